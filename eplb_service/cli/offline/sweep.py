"""``eplb sweep``: many traces under many settings, each replayed, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError, whole_numbers
from eplb_service.cli.offline.replay import policies_of
from eplb_service.cli.offline.sweep_report import SweepRow, print_sweep, sweep_document
from eplb_service.cli.offline.warmup import compile_solver
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.layout import CostOptions, RankOptions, SlotOptions
from eplb_service.cli.options.planner import takes_planner_settings
from eplb_service.cli.options.trace import ReadingOptions, check_tokens, choices_per_step
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json, write_json
from eplb_service.cli.repeated import SEVERAL
from eplb_service.io.open_trace import KNOWN, naming
from eplb_service.placement import PlacementError
from eplb_service.planner.options import PlannerOption, number_or_auto, planner_options, planner_settings
from eplb_service.planner.settings import NumberOrAuto, PlannerSettings

if TYPE_CHECKING:
    from eplb_service.replay.sweep import SweepCell

_BOOLEANS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True)
class GridOptions:
    """What is varied; all combinations are run."""

    SECTION: ClassVar = "What is varied"

    policy: Annotated[
        str,
        typer.Option(
            metavar=SEVERAL, help="Policies, with commas between, as for `eplb replay`; 'all' names them."
        ),
    ] = "deepseek,flashlb"
    slots: Annotated[
        str | None,
        typer.Option(metavar=SEVERAL, help="Expert slots per rank and layer; several with commas."),
    ] = None
    redundant: Annotated[
        str | None,
        typer.Option(
            metavar=SEVERAL,
            help="Slots per layer beyond one per expert, instead of --slots; several with commas.",
        ),
    ] = None
    window: Annotated[
        str,
        typer.Option(metavar=SEVERAL, help="Steps that a decision looks at, at most; several with commas."),
    ] = "512"
    interval: Annotated[
        str, typer.Option(metavar=SEVERAL, help="Steps between decisions; several with commas.")
    ] = "256"
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE,...",
            help="Values of one of the settings below, in place of its option; may be given again for another setting.",
        ),
    ] = None
    hindsight: Annotated[bool, typer.Option(help="Also fit placements on the very steps served.")] = False

    def choices(self) -> dict[str, list[Any]]:
        """Values of each setting of --set; raises ``UserError`` where one is none."""
        found: dict[str, list[Any]] = {}
        for text in self.vary or []:
            name, equals, values = text.partition("=")
            option = _variable().get(name.strip().replace("-", "_"))
            if not equals or option is None or option.name in found:
                raise UserError(
                    f"--set {text!r}: write NAME=VALUE,VALUE, each name once; names are {', '.join(_variable())}"
                )
            found[option.name] = list(
                dict.fromkeys(_value(option, part.strip()) for part in values.split(","))
            )
        return found


@dataclass(frozen=True)
class SweepOutputOptions:
    """Where the results go."""

    SECTION: ClassVar = "Results"

    out: Annotated[Path | None, typer.Option(help="Write all figures to this .json file.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False


@dataclass(frozen=True)
class PlaceOptions:
    """Where the work is done."""

    SECTION: ClassVar = "How it is run"

    workers: Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores by default.")] = None
    ray: Annotated[
        str | None, typer.Option(help="Run on the Ray cluster at this address ('local': here).")
    ] = None


@takes_planner_settings("policy")
@option_groups
def sweep(
    traces: Annotated[list[Path], typer.Argument(help=f"Each one of: {KNOWN}.")],
    group: RankOptions,
    varied: GridOptions,
    cost: CostOptions,
    place: PlaceOptions,
    output: SweepOutputOptions,
    reading: ReadingOptions,
    **planner: Any,
) -> None:
    """Replay many traces under many settings, and show all of it in one table.

    Every trace is replayed with every combination of policies, slots, windows, intervals and --set, each as `eplb
    replay` does it, on all cores or on a Ray cluster, whose nodes must see the traces under the same paths. Figures of
    one trace are of the same steps. All traces are looked at before the work begins. Ctrl-C ends it, and shows what has
    been done by then.
    """
    if output.out is not None:
        check_output(output.out, (".json",))
    policies_of(varied.policy)
    settings = [(choice, planner_settings({**planner, **choice})) for choice in _grid(varied.choices())]
    cells = [
        cell
        for path in dict.fromkeys(traces)
        for cell in _cells(path, group, varied, cost, reading, settings)
    ]
    compile_solver()
    rows, interrupted = _run(cells, place)
    rests_on = cost.assumptions(cells[0].scene.costs)
    document = sweep_document(rows, rests_on, interrupted=interrupted)
    if output.out is not None:
        write_json(output.out, document)
    if output.json:
        print_json(document)
    else:
        print_sweep(output_console(), rows, rests_on, interrupted=interrupted)
    if interrupted:
        raise typer.Exit(130)


def _cells(
    path: Path,
    group: RankOptions,
    varied: GridOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    settings: Sequence[tuple[Mapping[str, Any], PlannerSettings]],
) -> Iterator[SweepCell]:
    """What is to be done with one trace; raises what would go wrong at the beginning of any of it, naming the trace."""
    from eplb_service.replay.jobs import Scene, TraceFile
    from eplb_service.replay.runner import jobs_for, schedules
    from eplb_service.replay.schedule import ReplayError
    from eplb_service.replay.sweep import SweepCell

    file = TraceFile(path, reading.reading())
    trace = file.open()
    with naming(path):
        check_tokens(path, trace)
        choices = choices_per_step(trace)
    try:
        counts = SlotOptions(varied.slots, varied.redundant).counts(trace.experts, group.ranks)
        windows = whole_numbers("--window", varied.window)
        setups = schedules(windows, whole_numbers("--interval", varied.interval), counts)
        # All setups score the same steps: those after the latest first decision.
        start = max(setup.schedule.first for setup in setups)
        for choice, chosen in settings:
            costs = cost.costs(chosen, group.ranks, trace.experts, choices)
            scene = Scene(group.topology(trace), costs)
            for setup in setups:
                shifted = replace(setup, schedule=replace(setup.schedule, start=start))
                jobs = jobs_for(policies_of(varied.policy), [shifted], chosen, hindsight=varied.hindsight)
                decisions = len(shifted.schedule.decisions(trace.steps))
                scene.placement(trace, shifted)
                effort = decisions * trace.layers * trace.experts * len(jobs)
                yield SweepCell(file, scene, tuple(jobs), choice, effort)
    except (UserError, ReplayError, PlacementError) as error:
        raise UserError(f"{path}: {error}") from error


def _run(cells: Sequence[SweepCell], place: PlaceOptions) -> tuple[list[SweepRow], bool]:
    """What was found of each cell, in their order, and whether Ctrl-C stopped it."""
    from rich.console import Console

    from eplb_service.replay.sweep import sweep as run_sweep

    found: dict[int, list[SweepRow]] = {}
    done = run_sweep(cells, place.workers, place.ray)
    interrupted = False
    console = Console(stderr=True, soft_wrap=True)
    with console.status(f"0 of {len(cells)} replays done") as status:
        try:
            for number, result in done:
                found[number] = SweepRow.all_of(cells[number], result)
                status.update(f"{len(found)} of {len(cells)} replays done")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            done.close()  # type: ignore[attr-defined]
    if interrupted and not found:
        raise KeyboardInterrupt
    return [row for number in sorted(found) for row in found[number]], interrupted


def _grid(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    from eplb_service.replay.sweep import grid

    return grid(choices)


def _variable() -> dict[str, PlannerOption]:
    """Settings that --set may vary, by name: those of one number, word or switch."""
    lists = {field.name for field in fields(PlannerSettings) if isinstance(field.default, tuple)}
    left_out = {"policy", "threads", "cost_curve", *lists}
    return {option.name: option for option in planner_options() if option.name not in left_out}


def _value(option: PlannerOption, text: str) -> Any:
    try:
        if option.kind == NumberOrAuto:
            return number_or_auto(text)
        if option.kind is bool:
            return _BOOLEANS[text.lower()]
        return option.kind(text)
    except (ValueError, KeyError):
        expected = "on or off" if option.kind is bool else "a number"
        raise UserError(f"--set {option.name}: {text!r} is not {expected}") from None
