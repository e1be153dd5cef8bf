"""``eplb advise``: what to set for a deployment, and whether balancing pays there, from its recorded heat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eplb_service.atomic_write import check_output
from eplb_service.cli.options import JSON, SEVERAL, option, takes_options
from eplb_service.cli.output import output_console, print_json, rows_table, write_json
from eplb_service.cli.replay import OUT, replay_progress
from eplb_service.cli.trace_options import (
    HEAT,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    choices_per_step,
    planner_flags,
    slots_of_redundant,
)
from eplb_service.cli.warmup import compile_solver
from eplb_service.planner.settings import planner_settings

if TYPE_CHECKING:
    from eplb_service.replay.advise import Advice, Option
    from eplb_service.replay.costs import Assumption, Costs
    from eplb_service.replay.policy import Job
    from eplb_service.replay.result import Replay

_BAR = 18
_TRIED = "What is tried"


@takes_options(*planner_flags("policy", "move_price"))
def advise(
    group: RankOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    redundant: str | None = option(
        None,
        "Redundant experts per layer to try, with commas; a few by default.",
        metavar=SEVERAL,
        section=_TRIED,
    ),
    window: int | None = option(
        None, "Steps that a decision sees; 256, or a quarter of a short trace.", min=1
    ),
    workers: int | None = WORKERS,
    out: Path | None = OUT,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Advise how many redundant experts, which window and interval, and whether balancing pays at all."""
    if out is not None:
        check_output(out, (".json",))
    settings = planner_settings(planner)
    from eplb_service.replay import advise as advice
    from eplb_service.replay.jobs import TraceFile, check_jobs, replay_file
    from eplb_service.replay.loop import Scene

    file = TraceFile(heat, reading.reading())
    trace = reading.open(heat)
    choices = choices_per_step(trace)
    costs = cost.costs(settings, trace, group.ranks)
    scene = Scene(group.topology(trace), costs)
    width = window or max(1, min(256, trace.steps // 4))
    slots = _slots(trace.experts, group.ranks, redundant)

    def run(jobs: list[Job]) -> Replay:
        check_jobs(jobs, trace, scene)
        compile_solver()
        with replay_progress(jobs, trace.steps) as advance:
            found = replay_file(file, jobs, scene, workers=workers, on_progress=advance)
        if found.interrupted:
            raise KeyboardInterrupt
        return found

    given = advice.advise(run, slots, width, trace.steps, settings, choices)
    rests_on = cost.assumptions(settings, costs)
    document = _document(given, group.ranks, trace.experts, rests_on)
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), given, group.ranks, trace.experts, costs, rests_on)


def _slots(experts: int, ranks: int, redundant: str | None) -> list[int]:
    """Slots per rank to try, of ``--redundant``, or as few as hold the experts and one, two and four more."""
    least = -(-experts // ranks)
    if redundant is None:
        return [count for count in (least, least + 1, least + 2, least + 4) if count <= experts]
    return slots_of_redundant(experts, ranks, redundant)


def _print(
    console: Console,
    given: Advice,
    ranks: int,
    experts: int,
    costs: Costs,
    rests_on: Sequence[Assumption],
) -> None:
    setup = given.chosen.setup
    if given.pays:
        console.print(
            f"[bold]Balance, with {given.redundant} redundant experts per layer "
            f"({setup.slots} slots per rank), window {setup.window}, interval {setup.interval}.[/]"
        )
    else:
        console.print("[bold]Balancing does not pay here.[/]")
    for reason in given.reasons:
        console.print(f"  {reason}")
    timed = bool(costs.step_ms) or costs.curve is not None
    console.print(_slot_table(given, ranks, experts, timed=timed), soft_wrap=False)
    rows = [(f"window {o.setup.window}, every {o.setup.interval}", o) for o in given.by_schedule]
    console.print(_curve("against window and interval", rows, timed), soft_wrap=False)
    rows = [(f"move price {option.move_price:g}", option) for option in given.by_moves]
    console.print(_curve("against moves", rows, timed), soft_wrap=False)
    best = np.argsort(-given.gain_L, kind="stable")
    console.print(
        "Layers that win most: " + ", ".join(f"{layer} ({given.gain_L[layer]:+.3f})" for layer in best[:5])
    )
    idle = int((given.gain_L < 0.02).sum())
    console.print(f"Layers that win less than 0.02: {idle} of {given.gain_L.size}.")
    console.print("This rests on:")
    for assumption in rests_on:
        console.print(f"  {assumption}", markup=False)


def _slot_table(given: Advice, ranks: int, experts: int, *, timed: bool) -> Table:
    """Balance, milliseconds and memory by the number of slots."""
    known = any(tried.bytes_per_rank for tried in given.by_redundancy)
    in_ms = all(tried.moe_ms is not None for tried in given.by_redundancy)
    rows = []
    for tried in given.by_redundancy:
        slots = tried.setup.slots
        advised = " (advised)" if slots == given.chosen.setup.slots else ""
        row = {"slots per rank": f"{slots}{advised}", "redundant": str(slots * ranks - experts)}
        if in_ms:
            row["MoE ms"] = f"{tried.moe_ms:.3f}"
        row["PAR"] = f"{tried.par:.3f}"
        if timed and not in_ms:
            row["net ms"] = f"{tried.net_ms:.2f}"
        row["memory"] = f"{slots * ranks / experts - 1:+.0%}"
        if known:
            row["GiB per rank"] = f"{tried.bytes_per_rank / 2**30:.2f}"
        rows.append(row)
    return rows_table(rows, f"{'time' if in_ms else 'PAR'} against slots")


def _curve(title: str, tried: Sequence[tuple[str, Option]], timed: bool) -> Table:
    """One row per setting, its time where there is a cost curve and else its PAR as a bar; all rows share one scale."""
    in_ms = all(one.moe_ms is not None for _, one in tried)
    what = "MoE ms" if in_ms else "PAR"
    values = [(one.moe_ms or 0.0) if in_ms else one.par for _, one in tried]
    low, high = min(values), max(values)
    rows = []
    for (label, one), value in zip(tried, values, strict=True):
        row = {"setting": label, what: f"{value:.3f}", "slots moved": f"{one.moved_share:.1%}"}
        if timed:
            row["net ms"] = f"{one.net_ms:.3f}" if in_ms else f"{one.net_ms:.2f}"
        share = (value - low) / (high - low) if high > low else 0.0
        bar = "█" * (1 + round(share * (_BAR - 1)))
        rows.append({**row, f"{what}, {low:.3f} to {high:.3f}": f"{bar:<{_BAR}}"})
    return rows_table(rows, title)


def _document(given: Advice, ranks: int, experts: int, rests_on: Sequence[Assumption]) -> dict[str, Any]:
    def plain(option: Option) -> dict[str, Any]:
        setup, figures = option.setup, vars(option)
        return {
            "redundant": setup.slots * ranks - experts,
            "slots": setup.slots,
            "window_steps": setup.window,
            "interval_steps": setup.interval,
            **{name: figures[name] for name in figures if name not in ("setup", "label")},
        }

    return {
        "pays": given.pays,
        "reasons": given.reasons,
        "par_left_alone": given.par_left_alone,
        "par": given.par,
        "noise_floor": given.floor,
        "moe_ms_left_alone": given.moe_ms_left_alone,
        "advised": plain(given.chosen),
        "by_redundancy": [plain(option) for option in given.by_redundancy],
        "by_schedule": [plain(option) for option in given.by_schedule],
        "by_move_price": [plain(option) for option in given.by_moves],
        "gain_per_layer": given.gain_L,
        "assumptions": rests_on,
    }
