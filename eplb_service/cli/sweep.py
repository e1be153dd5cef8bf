"""``eplb sweep``: many traces under many settings, each replayed, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from eplb_service.atomic_write import check_output
from eplb_service.cli.options import JSON, SEVERAL, UserError, argument, option, takes_options, whole_numbers
from eplb_service.cli.output import output_console, print_json, rows_table, write_json
from eplb_service.cli.replay import INTERVAL, OUT, WINDOW, policies_of, policy_figures
from eplb_service.cli.trace_options import (
    RAY,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    planner_flags,
)
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.open_trace import KNOWN
from eplb_service.placement import PlacementError, mean_par
from eplb_service.planner.settings import NumberOrAuto, number_or_auto, planner_options, planner_settings
from eplb_service.replay.policy import ReplayError

if TYPE_CHECKING:
    from eplb_service.replay.costs import Assumption
    from eplb_service.replay.result import Replay
    from eplb_service.replay.sweep import SweepCell

    Row = Mapping[str, Any]

_BOOLEANS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_VARIED = "What is varied"
_SETUP = {"slots": "{} slots", "window_steps": "window {}", "interval_steps": "interval {}"}


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
        section=_VARIED,
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
    from eplb_service.replay.jobs import TraceFile, jobs_for, setups_of
    from eplb_service.replay.loop import Scene
    from eplb_service.replay.sweep import SweepCell, grid

    policies = policies_of(policy)
    settings = [(choice, planner_settings({**planner, **choice})) for choice in grid(_choices(vary or []))]

    def cells_of(path: Path) -> Iterator[SweepCell]:
        file = TraceFile(path, reading.reading())
        trace = reading.open(path)
        counts = layout.counts(trace.experts, group.ranks)
        windows = whole_numbers("--window", window)
        setups = setups_of(windows, whole_numbers("--interval", interval), counts)
        # All setups score the same steps: those after the latest first decision.
        start = max(setup.first for setup in setups)
        for choice, chosen in settings:
            scene = Scene(group.topology(trace), cost.costs(chosen, trace, group.ranks))
            for setup in setups:
                shifted = replace(setup, start=start)
                jobs = jobs_for(policies, [shifted], chosen, hindsight=hindsight)
                scene.placement(trace, shifted.slots)
                effort = len(shifted.decisions(trace.steps)) * trace.layers * trace.experts * len(jobs)
                yield SweepCell(file, scene, tuple(jobs), choice, effort)

    cells: list[SweepCell] = []
    for path in dict.fromkeys(traces):
        try:
            cells += cells_of(path)
        except (UserError, ReplayError, PlacementError) as error:
            raise UserError(f"{path}: {error}") from error
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
    variable = {one.name: one for one in planner_options() if one.name not in left_out}
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
        if kind == NumberOrAuto:
            return number_or_auto(text)
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        expected = "on or off" if kind is bool else "a number"
        raise UserError(f"--set {setting.name}: {text!r} is not {expected}") from None


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
        {
            "trace": cell.file.path,
            "settings": cell.varied,
            **policy_figures(result, policy),
            "layers": result.layers,
            "experts": result.experts,
            "ranks": result.ranks,
            "first_step_scored": result.first,
            "steps_scored": result.steps,
            "decisions_made": len(policy.decisions),
        }
        for policy in result.policies
    ]


def _choice(row: Row) -> tuple[tuple[str, Any], ...]:
    """Slots, schedule and settings of a row, by name."""
    return (*((name, row[name]) for name in _SETUP), *row["settings"].items())


def _print(
    console: Console, rows: Sequence[Row], rests_on: Sequence[Assumption], *, interrupted: bool
) -> None:
    """Print a table per trace, with a row per choice and policy, and where there are several traces their means."""
    varied = _varied(rows)
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    console.print(
        ", ".join(
            _counted(count, noun)
            for count, noun in (
                (len(traces), "trace"),
                (len({_choice(row) for row in rows}), "setting"),
                (len({row["policy"] for row in rows}), "policy"),
            )
        )
        + ("; stopped early, what had been done by then" if interrupted else "")
    )
    for trace in traces:
        console.print(
            _trace_table(trace, [row for row in rows if row["trace"] == trace], varied), soft_wrap=False
        )
    if len(traces) > 1 and not interrupted:
        console.print(_means_table(rows, varied), soft_wrap=False)
    console.print("PAR: hottest rank over mean rank in each step; alone: all experts left alone.")
    if any(row["saved_ms_per_step"] or row["moe_ms_per_step"] for row in rows):
        console.print(f"This rests on: {'; '.join(map(str, rests_on))}.", markup=False)


def _trace_table(trace: Path, rows: Sequence[Row], varied: set[str]) -> Table:
    cells = []
    for row in rows:
        time_ms = row["moe_ms_per_step"]
        cells.append(
            {
                "policy": _label(row, varied),
                **({} if time_ms is None else {"MoE ms": f"{time_ms:.3f}"}),
                "PAR": f"{row['par_realised']:.3f}",
                "alone": f"{row['par_left_alone']:.3f}",
                "moves each": f"{row['moves'] / row['decisions_made']:,.1f}",
                "solve ms": f"{row['solve_ms_mean']:.1f}",
            }
        )
    return rows_table(cells, str(trace))


def _means_table(rows: Sequence[Row], varied: set[str]) -> Table:
    """Over all traces, the best choice first; of slots by their number, which may be others on another trace."""
    by_choice: dict[str, list[Row]] = {}
    for row in rows:
        by_choice.setdefault(_label(row, varied), []).append(row)
    cells = [
        {
            "mean over traces": label,
            "PAR": f"{_mean(of_label, 'par_realised'):.3f}",
            "alone": f"{_mean(of_label, 'par_left_alone'):.3f}",
            "traces": str(len(of_label)),
        }
        for label, of_label in by_choice.items()
    ]
    return rows_table(sorted(cells, key=lambda row: float(row["PAR"])))


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(mean_par(np.array([row[name] for row in rows])))


def _varied(rows: Sequence[Row]) -> set[str]:
    """Names whose values are not the same in all rows."""
    values: dict[str, set[Any]] = {}
    for row in rows:
        for name, value in _choice(row):
            values.setdefault(name, set()).add(value)
    return {name for name, found in values.items() if len(found) > 1}


def _label(row: Row, varied: set[str]) -> str:
    parts = [
        _SETUP.get(name, f"{name}={{}}").format(_text(value))
        for name, value in _choice(row)
        if name in varied
    ]
    return ", ".join([row["policy"], *parts])


def _counted(count: int, noun: str) -> str:
    """``1 trace``, ``2 policies``."""
    several = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else several}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
