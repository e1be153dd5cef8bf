"""``eplb replay``: what each policy would have realised along a recorded trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError
from eplb_service.cli.json_out import print_json, write_json
from eplb_service.cli.replay_report import print_replay, replay_document
from eplb_service.cli.warmup import compile_solver
from eplb_service.heat.trace import read_heat
from eplb_service.placement import Placement
from eplb_service.planner.settings import POLICIES, PlannerSettings
from eplb_service.replay.result import Decision
from eplb_service.replay.schedule import Schedule


def replay(
    heat: Annotated[
        Path, typer.Option(help="Trace: .npz with 'heat' or 'counts' [steps, layers, experts], or .npy.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the expert-parallel group.")],
    slots: Annotated[int | None, typer.Option(min=1, help="Expert slots per rank and layer.")] = None,
    redundant: Annotated[
        int | None, typer.Option(min=0, help="Slots per layer beyond one per expert, instead of --slots.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies to score, with commas between.")] = ",".join(POLICIES),
    window: Annotated[int, typer.Option(min=1, help="Steps that a decision looks at.")] = 256,
    interval: Annotated[int, typer.Option(min=1, help="Steps from one decision to the next.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Layers solved at a time; all cores by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write every decision to this .json file as well.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Run the planner along a trace: decide on a window, serve the next steps under the decision, and score those.

    All policies start from experts in order and are scored over the same steps, those after the first window.
    """
    if out is not None:
        check_output(out, (".json",))
    policies = _policies(policy)
    settings = PlannerSettings(seed=seed, threads=threads)
    schedule = Schedule(window, interval)
    heat_TLE = read_heat(heat)
    steps, layers, experts = heat_TLE.shape
    placement = Placement.linear(layers, experts, ranks, _slots(experts, ranks, slots, redundant))
    decisions = len(schedule.decisions(steps))
    compile_solver()
    from eplb_service.replay import runner

    with _progress(policies, decisions) as advance:
        result = runner.replay(
            heat_TLE, placement, policies, schedule, settings=settings, on_decision=advance
        )
    document = replay_document(result, placement)
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        print_replay(Console(soft_wrap=True, highlight=False), result, placement)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or "nothing"
        raise UserError(f"--policy names {found}; choose among {', '.join(POLICIES)}")
    return names


def _slots(experts: int, ranks: int, slots: int | None, redundant: int | None) -> int:
    if (slots is None) == (redundant is None):
        raise UserError("give either --slots or --redundant")
    if slots is not None:
        return slots
    total = experts + (redundant or 0)
    if total % ranks:
        raise UserError(
            f"{experts} experts and {redundant} redundant ones do not spread evenly over {ranks} ranks; "
            f"use --redundant {-experts % ranks} or that plus a multiple of {ranks}"
        )
    return total // ranks


@contextmanager
def _progress(policies: tuple[str, ...], decisions: int) -> Iterator[Callable[[str, Decision], None]]:
    """A progress bar on stderr, one task a policy."""
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("PAR {task.fields[par]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {name: progress.add_task(name, total=decisions, par="…") for name in policies}

        def advance(name: str, decision: Decision) -> None:
            progress.update(tasks[name], advance=1, par=f"{decision.par_realised:.3f}")

        yield advance
