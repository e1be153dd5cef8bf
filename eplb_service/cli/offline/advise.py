"""``eplb advise``: what to set for a deployment, and whether balancing pays there, from its recorded heat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from eplb_service.atomic_write import check_output
from eplb_service.cli.offline.replay_progress import replay_progress
from eplb_service.cli.offline.resumable import Resumable, ResumeOption, WorkersOption
from eplb_service.cli.offline.warmup import compile_solver
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.layout import CostOptions, RankOptions, slots_of_redundant
from eplb_service.cli.options.planner import takes_planner_settings
from eplb_service.cli.options.trace import HeatOption, ReadingOptions, check_tokens, choices_per_step
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json, write_json
from eplb_service.cli.output.tables import compact_table
from eplb_service.cli.repeated import SEVERAL
from eplb_service.io.open_trace import naming
from eplb_service.io.trace import Trace
from eplb_service.planner.options import planner_settings

if TYPE_CHECKING:
    from eplb_service.replay.advice import Advice
    from eplb_service.replay.advice_options import Option
    from eplb_service.replay.assumptions import Assumption
    from eplb_service.replay.costs import Costs
    from eplb_service.replay.jobs import Job, Scene, TraceFile
    from eplb_service.replay.result import Replay

_BAR = 18


@dataclass(frozen=True)
class TrialOptions:
    """Which settings are tried, and how."""

    SECTION: ClassVar = "What is tried"

    redundant: Annotated[
        str | None,
        typer.Option(
            metavar=SEVERAL, help="Redundant experts per layer to try, with commas; a few by default."
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Steps that a decision sees; 256, or a quarter of a short trace."),
    ] = None
    workers: WorkersOption = None
    resume: ResumeOption = None


@dataclass(frozen=True)
class OutputOptions:
    """Where the advice goes."""

    SECTION: ClassVar = "Results"

    out: Annotated[Path | None, typer.Option(help="Write all that was tried to this .json file.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False


@takes_planner_settings("policy", "move_price")
@option_groups
def advise(
    heat: HeatOption,
    group: RankOptions,
    trial: TrialOptions,
    cost: CostOptions,
    output: OutputOptions,
    reading: ReadingOptions,
    **planner: Any,
) -> None:
    """Advise how many redundant experts, which window and interval, and whether balancing pays at all."""
    if output.out is not None:
        check_output(output.out, (".json",))
    settings = planner_settings(planner)
    from eplb_service.replay import advice
    from eplb_service.replay.jobs import Scene, TraceFile
    from eplb_service.replay.schedule import Schedule

    file = TraceFile(heat, reading.reading())
    trace = file.open()
    with naming(heat):
        check_tokens(heat, trace)
        choices = choices_per_step(trace)
    costs = cost.costs(settings, group.ranks, trace.experts, choices)
    scene = Scene(group.topology(trace), costs)
    width = trial.window or max(1, min(256, trace.steps // 4))
    slots = _slots(trace.experts, group.ranks, trial.redundant)
    first = advice.first_jobs(slots, Schedule(width, width), settings)
    for job in first:
        job.setup.schedule.decisions(trace.steps)
        scene.placement(trace, job.setup)
    work = Resumable(trial.resume)
    compile_solver()
    by_redundancy = _round(work, file, first, trace, scene, trial.workers)
    second = advice.second_jobs(by_redundancy, trace.steps, settings)
    by_schedule = _round(work, file, second, trace, scene, trial.workers)
    third = advice.third_jobs(by_redundancy, by_schedule, slots, settings)
    under_schedule = _round(work, file, third, trace, scene, trial.workers)
    given = advice.advise(by_redundancy, by_schedule, under_schedule, settings, choices)
    rests_on = cost.assumptions(costs)
    document = _document(given, group.ranks, trace.experts, rests_on)
    if output.out is not None:
        write_json(output.out, document)
    work.finish()
    if output.json:
        print_json(document)
    else:
        _print(output_console(), given, group.ranks, trace.experts, costs, rests_on)


def _round(
    work: Resumable, file: TraceFile, jobs: list[Job], trace: Trace, scene: Scene, workers: int | None
) -> Replay:
    """One round to its end; Ctrl-C passes through once all rounds' state has been left behind."""
    from eplb_service.replay.runner import replay_file

    ledger = work.ledger(jobs, trace, scene)
    with work.kept(), replay_progress(jobs, trace.steps, ledger.decisions) as advance:
        found = replay_file(file, jobs, scene, workers=workers, on_progress=advance, ledger=ledger)
        if found.interrupted:
            raise KeyboardInterrupt
    return found


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
    schedule = given.chosen.setup.schedule
    if given.pays:
        console.print(
            f"[bold]Balance, with {given.redundant} redundant experts per layer "
            f"({given.chosen.setup.slots} slots per rank), window {schedule.window}, interval {schedule.interval}.[/]"
        )
    else:
        console.print("[bold]Balancing does not pay here.[/]")
    for reason in given.reasons:
        console.print(f"  {reason}")
    timed = bool(costs.step_ms) or costs.curve is not None
    console.print(_slot_table(given, ranks, experts, timed=timed), soft_wrap=False)
    rows = [
        (f"window {o.setup.schedule.window}, every {o.setup.schedule.interval}", o) for o in given.by_schedule
    ]
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
    """Slots against balance, milliseconds and memory: what each number of redundant experts costs and wins."""
    known = any(option.bytes_per_rank for option in given.by_redundancy)
    in_ms = all(option.moe_ms is not None for option in given.by_redundancy)
    columns = {
        "MoE ms": in_ms,
        "PAR": True,
        "net ms": timed and not in_ms,
        "memory": True,
        "GiB per rank": known,
    }
    shown = [name for name, wanted in columns.items() if wanted]
    title = f"{'time' if in_ms else 'PAR'} against slots"
    table = compact_table("slots per rank", "redundant", *shown, title=title)
    for option in given.by_redundancy:
        slots = option.setup.slots
        cells = {
            "MoE ms": f"{option.moe_ms or 0.0:.3f}",
            "PAR": f"{option.par:.3f}",
            "net ms": f"{option.net_ms:.2f}",
            "memory": f"{slots * ranks / experts - 1:+.0%}",
            "GiB per rank": f"{option.bytes_per_rank / 2**30:.2f}",
        }
        table.add_row(
            f"{slots}{' (advised)' if slots == given.chosen.setup.slots else ''}",
            str(slots * ranks - experts),
            *(cells[name] for name in shown),
        )
    return table


def _curve(title: str, rows: Sequence[tuple[str, Option]], timed: bool) -> Table:
    """One row per setting, its time where there is a cost curve and else its PAR as a bar; all rows share one scale."""
    net = ["net ms"] if timed else []
    in_ms = all(option.moe_ms is not None for _, option in rows)
    what = "MoE ms" if in_ms else "PAR"
    table = compact_table("setting", what, "slots moved", *net, title=title)
    values = [(option.moe_ms or 0.0) if in_ms else option.par for _, option in rows]
    low, high = min(values), max(values)
    table.add_column(f"{what}, {low:.3f} to {high:.3f}", no_wrap=True)
    for (label, option), value in zip(rows, values, strict=True):
        share = (value - low) / (high - low) if high > low else 0.0
        table.add_row(
            label,
            f"{value:.3f}",
            f"{option.moved_share:.1%}",
            *([f"{option.net_ms:.3f}" if in_ms else f"{option.net_ms:.2f}"] if timed else []),
            "█" * (1 + round(share * (_BAR - 1))),
        )
    return table


def _document(given: Advice, ranks: int, experts: int, rests_on: Sequence[Assumption]) -> dict[str, Any]:
    def plain(option: Option) -> dict[str, Any]:
        fields = asdict(option)
        setup = option.setup
        del fields["setup"], fields["label"]
        return {
            "redundant": setup.slots * ranks - experts,
            "slots": setup.slots,
            "window_steps": setup.schedule.window,
            "interval_steps": setup.schedule.interval,
            **fields,
        }

    return {
        "pays": given.pays,
        "reasons": list(given.reasons),
        "par_left_alone": given.par_left_alone,
        "par": given.par,
        "noise_floor": given.floor,
        "moe_ms_left_alone": given.moe_ms_left_alone,
        "advised": plain(given.chosen),
        "by_redundancy": [plain(option) for option in given.by_redundancy],
        "by_schedule": [plain(option) for option in given.by_schedule],
        "by_move_price": [plain(option) for option in given.by_moves],
        "gain_per_layer": given.gain_L,
        "assumptions": [asdict(assumption) for assumption in rests_on],
    }
