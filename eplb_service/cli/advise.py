"""``eplb advise``: what to set for a deployment, and whether balancing pays there, from its recorded heat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from eplb_service.atomic_write import check_output
from eplb_service.cli.options import JSON, SEVERAL, option, takes_options
from eplb_service.cli.output import figure, output_console, print_json, table_of, write_json
from eplb_service.cli.replay import OUT, replay_progress
from eplb_service.cli.trace_options import (
    HEAT,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    basis_text,
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


@takes_options(*planner_flags("policy", "move_price"))
def advise(
    group: RankOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    redundant: str | None = option(
        None, "Redundant experts per layer to try, with commas; a few by default.", metavar=SEVERAL
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
    costs = cost.costs(settings, trace, group.ranks)
    scene = Scene(group.topology(trace), costs)
    width = window or max(1, min(256, trace.steps // 4))
    least = -(-trace.experts // group.ranks)
    slots = [count for count in (least, least + 1, least + 2, least + 4) if count <= trace.experts]
    if redundant is not None:
        slots = slots_of_redundant(trace.experts, group.ranks, redundant)

    def run(jobs: list[Job]) -> Replay:
        check_jobs(jobs, trace, scene)
        compile_solver()
        with replay_progress(jobs, trace.steps) as advance:
            found = replay_file(file, jobs, scene, workers=workers, on_progress=advance)
        if found.interrupted:
            raise KeyboardInterrupt
        return found

    given = advice.advise(run, slots, width, trace.steps, settings)
    rests_on = cost.assumptions(settings, costs)
    document = {**vars(given), "assumptions": rests_on}
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), given, costs, rests_on)


def _print(console: Console, given: Advice, costs: Costs, rests_on: Sequence[Assumption]) -> None:
    setup = given.chosen.setup
    if given.pays:
        console.print(
            f"Balance, with {given.redundant} redundant experts per layer ({setup.slots} slots per rank), "
            f"window {setup.window}, interval {setup.interval}.",
            style="bold",
        )
    else:
        console.print("Balancing does not pay here.", style="bold")
    for reason in given.reasons:
        console.print(f"  {reason}")
    timed = bool(costs.step_ms) or costs.curve is not None
    columns = {
        "MoE ms": lambda one: figure(one.moe_ms),
        "PAR": lambda one: figure(one.par),
        "net ms": lambda one: figure(one.net_ms) if timed else None,
        "moved in 100 steps": lambda one: figure(one.moved_per_100_steps, ".1%"),
    }

    def tried(one: Option) -> str:
        return f"window {one.setup.window}, every {one.setup.interval}"

    by_slots = {
        "slots per rank": lambda one: f"{one.setup.slots}{' (advised)' if one.setup == setup else ''}",
        **columns,
        "GiB per rank": lambda one: figure(one.bytes_per_rank / 2**30, ".2f") if one.bytes_per_rank else None,
    }
    by_price = {"move price": lambda one: f"{one.move_price:g}", **columns}
    for rows, headings in (
        (given.by_redundancy, by_slots),
        (given.by_schedule, {"schedule": tried, **columns}),
        (given.by_moves, by_price),
    ):
        console.print(table_of(rows, headings), soft_wrap=False)
    best = np.argsort(-given.gain_L, kind="stable")[:5]
    console.print(
        "Layers that win most PAR: " + ", ".join(f"{layer} ({given.gain_L[layer]:+.3f})" for layer in best)
    )
    console.print(basis_text(rests_on))
