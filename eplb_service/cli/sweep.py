"""``eplb sweep``: replay many traces with many settings, and show the results in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from eplb_core.atomic_write import check_output
from eplb_core.placement import PlacementError
from eplb_core.planner.settings import (
    PlannerSettings,
    offline_options,
    planner_settings,
)
from eplb_service.cli.file_options import RankOptions, ReadingOptions, SlotOptions
from eplb_service.cli.options import JSON, SEVERAL, UserError, argument, option, takes_options, whole_numbers
from eplb_service.cli.output import figure, output_console, print_json, table_of, write_json
from eplb_service.cli.planner_options import (
    RAY,
    WORKERS,
    CostOptions,
    as_recorded,
    assumptions_text,
    check_groups,
    check_windows,
    planner_flags,
)
from eplb_service.cli.replay import INTERVAL, OUT, TERMS, WINDOW, figures_table, policies_of, policy_figures
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.open_trace import KNOWN
from eplb_service.replay.policy import ReplayError

if TYPE_CHECKING:
    from eplb_service.replay.costs import Assumption
    from eplb_service.replay.result import Replay
    from eplb_service.replay.sweep import SweepCell

    Row = Mapping[str, Any]

_VARIED = "Values to try"


@takes_options(*planner_flags("policy"))
def sweep(
    group: RankOptions,
    layout: SlotOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    traces: list[Path] = argument(help=f"Traces, each of one of these formats: {KNOWN}."),
    policy: str = option(
        "deepseek,flashlb",
        "Policies, as for `eplb replay`; 'all' selects all built-in ones.",
        metavar=SEVERAL,
        section=_VARIED,
    ),
    window: str = WINDOW,
    interval: str = INTERVAL,
    vary: list[str] | None = option(
        None,
        "Values to try for a setting below, instead of its option; repeat the flag for further settings.",
        "--set",
        metavar="NAME=VALUE,...",
    ),
    hindsight: bool = option(False, "Also fit placements to the scored steps themselves."),
    workers: int | None = WORKERS,
    ray: str | None = RAY,
    out: Path | None = OUT,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Replay many traces with many settings, and show the results in one table.

    Every trace is replayed with every combination of policies, slots, windows, intervals and --set, as by `eplb
    replay`. The replays use all cores, or a Ray cluster whose nodes can read the traces under the same paths. All
    figures of a trace cover the same steps. All traces are checked before the first replay. Ctrl-C stops the sweep and
    shows the results so far.
    """
    if out is not None:
        check_output(out, (".json",))
    from eplb_service.replay.sweep import grid

    policies = policies_of(policy)
    settings = [(choice, planner_settings({**planner, **choice})) for choice in grid(_choices(vary or []))]
    windows = whole_numbers("--window", window)
    intervals = whole_numbers("--interval", interval)
    grid_of_settings = _Grid(
        group, layout, cost, reading, policies, planner, settings, windows, intervals, hindsight
    )
    cells: list[SweepCell] = []
    for path in dict.fromkeys(traces):
        try:
            cells += grid_of_settings.cells(path)
        except (UserError, ReplayError, PlacementError) as error:
            raise UserError(f"{path}: {error}") from error
    check_windows(windows, intervals)
    compile_solver()
    rows, interrupted = _run(cells, workers, ray)
    assumptions = cost.assumptions(settings[0][1], cells[0].scene.costs)
    document = {"interrupted": interrupted, "assumptions": assumptions, "rows": rows}
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), rows, assumptions, interrupted=interrupted)
    if interrupted:
        raise typer.Exit(130)


@dataclass(frozen=True)
class _Grid:
    """Options of a sweep, including the values of its varied settings.

    ``settings`` has a pair for each combination of --set: the varied values, keyed by name, and the resulting settings.
    """

    group: RankOptions
    layout: SlotOptions
    cost: CostOptions
    reading: ReadingOptions
    policies: tuple[str, ...]
    planner: Mapping[str, Any]
    settings: Sequence[tuple[dict[str, Any], PlannerSettings]]
    windows: Sequence[int]
    intervals: Sequence[int]
    hindsight: bool

    def cells(self, path: Path) -> Iterator[SweepCell]:
        """Check a trace, and yield its cells: one for each combination of --set, slots, window and interval."""
        from eplb_service.replay.jobs import TraceFile, check_jobs, jobs_for, setups_of
        from eplb_service.replay.loop import Scene
        from eplb_service.replay.sweep import SweepCell

        file = TraceFile(path, self.reading.reading())
        trace = self.reading.open(path)
        ranks = self.group.ranks
        counts = self.layout.counts(trace.experts, ranks)
        setups = setups_of(self.windows, self.intervals, counts)
        # All setups are scored on the same steps: those after the latest of their first decisions.
        start = max(setup.first for setup in setups)
        for settings in {settings.expert_groups: settings for _, settings in self.settings}.values():
            check_groups(settings, trace.experts, counts, self.group.topology(trace))
        for choice, as_given in self.settings:
            settings = as_recorded(as_given, trace, {**self.planner, **choice})
            scene = Scene(self.group.topology(trace), self.cost.costs(settings, trace, ranks))
            for setup in setups:
                shifted = replace(setup, start=start)
                jobs = jobs_for(self.policies, [shifted], settings, hindsight=self.hindsight)
                check_jobs(jobs, trace, scene)
                yield SweepCell(file, scene, tuple(jobs), choice)


def _choices(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse the --set values into a dict keyed by setting. Raises ``UserError`` if a name or a value is invalid."""
    excluded = {"policy", "threads", "cost_curve"}
    settings = {field.name: field for field in offline_options() if field.name not in excluded}
    choices: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        setting = settings.get(name.strip().replace("-", "_"))
        if not equals or setting is None or setting.name in choices:
            raise UserError(
                f"--set is {text!r}; expected NAME=VALUE,VALUE with each name only once; the names are "
                f"{', '.join(settings)}"
            )
        choices[setting.name] = list(
            dict.fromkeys(_value(setting, value.strip()) for value in values.split(","))
        )
    return choices


def _value(setting: Field[Any], text: str) -> Any:
    from pydantic import TypeAdapter, ValidationError

    kind: Any = setting.type
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError:
        raise UserError(f"--set {setting.name}: {text!r} is not a number") from None


def _run(cells: Sequence[SweepCell], workers: int | None, ray: str | None) -> tuple[list[Row], bool]:
    """Replay all cells. Return their rows in order, and True if Ctrl-C stopped the sweep early."""
    from eplb_service.replay.sweep import sweep as run_sweep

    rows_of_cell: dict[int, list[Row]] = {}
    results = run_sweep(cells, workers, ray)
    interrupted = False
    console = Console(stderr=True, soft_wrap=True)
    with console.status(f"0 of {len(cells)} replays done") as status:
        try:
            for number, result in results:
                rows_of_cell[number] = _rows(cells[number], result)
                status.update(f"{len(rows_of_cell)} of {len(cells)} replays done")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            results.close()  # type: ignore[attr-defined]
    if interrupted and not rows_of_cell:
        raise KeyboardInterrupt
    return [row for number in sorted(rows_of_cell) for row in rows_of_cell[number]], interrupted


def _rows(cell: SweepCell, result: Replay) -> list[Row]:
    """Return one row per policy in a cell: its figures, keyed by JSON key."""
    return [
        {"trace": cell.file.path, "settings": cell.varied, **policy_figures(result, policy)}
        for policy in result.policies
    ]


def _labelled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with labels that state the policy and every choice that differs between rows."""
    choices = [
        [f"{row['slots']} slots", f"window {row['window']}", f"interval {row['interval']}"]
        + [f"{name}={value}" for name, value in row["settings"].items()]
        for row in rows
    ]
    shared = set.intersection(*map(set, choices))
    return [
        {**row, "label": ", ".join([row["policy"], *(text for text in texts if text not in shared)])}
        for row, texts in zip(rows, choices, strict=True)
    ]


def _print(
    console: Console, rows: Sequence[Row], assumptions: Sequence[Assumption], *, interrupted: bool
) -> None:
    """Print a table for each trace, with a row per choice and policy, and the means if there are several traces."""
    by_trace: dict[Path, list[Row]] = {}
    by_label: dict[str, list[Row]] = {}
    for row in _labelled(rows):
        by_trace.setdefault(row["trace"], []).append(row)
        by_label.setdefault(row["label"], []).append(row)
    stopped = "; stopped early, unfinished replays omitted" if interrupted else ""
    console.print(f"{len(by_trace)} traces, {len(by_label)} choices{stopped}")
    for trace, trace_rows in by_trace.items():
        console.print(figures_table(trace_rows, str(trace)), soft_wrap=False)
    if len(by_trace) > 1:
        console.print(_means_table(by_label), soft_wrap=False)
    console.print(TERMS)
    console.print(assumptions_text(assumptions))


def _means_table(by_label: Mapping[str, Sequence[Row]]) -> Table:
    """Return a table of means over the traces, lowest PAR first."""
    means: list[Row] = [
        {"label": label, **{name: fmean(row[name] for row in rows) for name in ("par", "par_left_alone")}}
        for label, rows in by_label.items()
    ]
    columns = {
        "mean over traces": lambda row: row["label"],
        "PAR": lambda row: figure(row["par"]),
        "initial": lambda row: figure(row["par_left_alone"]),
    }
    return table_of(sorted(means, key=lambda row: row["par"]), columns)
