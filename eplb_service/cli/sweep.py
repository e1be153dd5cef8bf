"""``eplb sweep``: many traces under many settings, each replayed, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from eplb_core.atomic_write import check_output
from eplb_core.placement import PlacementError
from eplb_core.planner.settings import NumberOrAuto, number_or_auto, offline_options, planner_settings
from eplb_service.cli.options import JSON, SEVERAL, UserError, argument, option, takes_options, whole_numbers
from eplb_service.cli.output import figure, output_console, print_json, table_of, write_json
from eplb_service.cli.replay import INTERVAL, OUT, TERMS, WINDOW, figures_table, policies_of, policy_figures
from eplb_service.cli.trace_options import (
    RAY,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    basis_text,
    check_groups,
    check_windows,
    planner_flags,
)
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.open_trace import KNOWN
from eplb_service.replay.policy import ReplayError

if TYPE_CHECKING:
    from eplb_service.replay.costs import Assumption
    from eplb_service.replay.result import Replay
    from eplb_service.replay.sweep import SweepCell

    Row = Mapping[str, Any]

_VARIED = "What is varied"


@takes_options(*planner_flags("policy"))
def sweep(
    group: RankOptions,
    layout: SlotOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    traces: list[Path] = argument(help=f"Each one of: {KNOWN}."),
    policy: str = option(
        "deepseek,flashlb",
        "Policies, as for `eplb replay`; 'all' names them.",
        metavar=SEVERAL,
        section=_VARIED,
    ),
    window: str = WINDOW,
    interval: str = INTERVAL,
    vary: list[str] | None = option(
        None,
        "Values of one of the settings below, in place of its option; may be given again for another setting.",
        "--set",
        metavar="NAME=VALUE,...",
    ),
    hindsight: bool = option(False, "Also fit placements on the very steps served."),
    workers: int | None = WORKERS,
    ray: str | None = RAY,
    out: Path | None = OUT,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Replay many traces under many settings, and show all of it in one table.

    Every trace is replayed with every combination of policies, slots, windows, intervals and --set, each as `eplb
    replay` does it, on all cores or on a Ray cluster, whose nodes must see the traces under the same paths. Figures of
    one trace are of the same steps. All traces are looked at before the work begins. Ctrl-C ends it, and shows what has
    been done by then.
    """
    if out is not None:
        check_output(out, (".json",))
    from eplb_service.replay.jobs import TraceFile, check_jobs, jobs_for, setups_of
    from eplb_service.replay.loop import Scene
    from eplb_service.replay.sweep import SweepCell, grid

    policies = policies_of(policy)
    settings = [(choice, planner_settings({**planner, **choice})) for choice in grid(_choices(vary or []))]

    windows = whole_numbers("--window", window)
    intervals = whole_numbers("--interval", interval)

    def cells_of(path: Path) -> Iterator[SweepCell]:
        file = TraceFile(path, reading.reading())
        trace = reading.open(path)
        counts = layout.counts(trace.experts, group.ranks)
        setups = setups_of(windows, intervals, counts)
        # All setups score the same steps: those after the latest first decision.
        start = max(setup.first for setup in setups)
        for chosen in {chosen.expert_groups: chosen for _, chosen in settings}.values():
            check_groups(chosen, trace.experts, counts, group.topology(trace))
        for choice, chosen in settings:
            scene = Scene(group.topology(trace), cost.costs(chosen, trace, group.ranks))
            for setup in setups:
                shifted = replace(setup, start=start)
                jobs = jobs_for(policies, [shifted], chosen, hindsight=hindsight)
                check_jobs(jobs, trace, scene)
                yield SweepCell(file, scene, tuple(jobs), choice)

    cells: list[SweepCell] = []
    for path in dict.fromkeys(traces):
        try:
            cells += cells_of(path)
        except (UserError, ReplayError, PlacementError) as error:
            raise UserError(f"{path}: {error}") from error
    check_windows(windows, intervals)
    compile_solver()
    rows, interrupted = _run(cells, workers, ray)
    rests_on = cost.assumptions(settings[0][1], cells[0].scene.costs)
    document = {"interrupted": interrupted, "assumptions": rests_on, "rows": rows}
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), rows, rests_on, interrupted=interrupted)
    if interrupted:
        raise typer.Exit(130)


def _choices(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values of each setting of --set; raises ``UserError`` where one is none."""
    left_out = {"policy", "threads", "cost_curve"}
    variable = {one.name: one for one in offline_options() if one.name not in left_out}
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        setting = variable.get(name.strip().replace("-", "_"))
        if not equals or setting is None or setting.name in found:
            raise UserError(
                f"--set {text!r}: write NAME=VALUE,VALUE, each name once; names are {', '.join(variable)}"
            )
        found[setting.name] = list(dict.fromkeys(_value(setting, part.strip()) for part in values.split(",")))
    return found


def _value(setting: Field[Any], text: str) -> Any:
    kind = setting.metadata["kind"]
    try:
        return number_or_auto(text) if kind == NumberOrAuto else kind(text)
    except ValueError:
        raise UserError(f"--set {setting.name}: {text!r} is not a number") from None


def _run(cells: Sequence[SweepCell], workers: int | None, ray: str | None) -> tuple[list[Row], bool]:
    """Rows of all cells, in their order, and whether Ctrl-C stopped it."""
    from eplb_service.replay.sweep import sweep as run_sweep

    found: dict[int, list[Row]] = {}
    done = run_sweep(cells, workers, ray)
    interrupted = False
    console = Console(stderr=True, soft_wrap=True)
    with console.status(f"0 of {len(cells)} replays done") as status:
        try:
            for number, result in done:
                found[number] = _rows(cells[number], result)
                status.update(f"{len(found)} of {len(cells)} replays done")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            done.close()  # type: ignore[attr-defined]
    if interrupted and not found:
        raise KeyboardInterrupt
    return [row for number in sorted(found) for row in found[number]], interrupted


def _rows(cell: SweepCell, result: Replay) -> list[Row]:
    """A row for each policy of a cell, as JSON has it."""
    return [
        {"trace": cell.file.path, "settings": cell.varied, **policy_figures(result, policy)}
        for policy in result.policies
    ]


def _labelled(rows: Sequence[Row]) -> list[Row]:
    """The rows with labels that name what is not the same in all of them."""
    choices = [
        [f"{row['slots']} slots", f"window {row['window']}", f"interval {row['interval']}"]
        + [f"{name}={value}" for name, value in row["settings"].items()]
        for row in rows
    ]
    shared = set.intersection(*map(set, choices))
    return [
        {**row, "label": ", ".join([row["policy"], *(part for part in parts if part not in shared)])}
        for row, parts in zip(rows, choices, strict=True)
    ]


def _print(
    console: Console, rows: Sequence[Row], rests_on: Sequence[Assumption], *, interrupted: bool
) -> None:
    """Print a table per trace, with a line per choice and policy, and where there are several traces their means."""
    by_trace: dict[Path, list[Row]] = {}
    by_label: dict[str, list[Row]] = {}
    for row in _labelled(rows):
        by_trace.setdefault(row["trace"], []).append(row)
        by_label.setdefault(row["label"], []).append(row)
    stopped = "; stopped early, what had been done by then" if interrupted else ""
    console.print(f"traces {len(by_trace)}, choices {len(by_label)}{stopped}")
    for trace, of_trace in by_trace.items():
        console.print(figures_table(of_trace, str(trace)), soft_wrap=False)
    if len(by_trace) > 1:
        means: list[Row] = [
            {
                "label": label,
                **{name: fmean(row[name] for row in alike) for name in ("par", "par_left_alone")},
            }
            for label, alike in by_label.items()
        ]
        columns = {
            "mean over traces": lambda row: row["label"],
            "PAR": lambda row: figure(row["par"]),
            "alone": lambda row: figure(row["par_left_alone"]),
        }
        console.print(table_of(sorted(means, key=lambda row: row["par"]), columns), soft_wrap=False)
    console.print(TERMS)
    console.print(basis_text(rests_on))
