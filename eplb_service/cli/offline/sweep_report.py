"""A sweep as a table for people and as a document for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eplb_service.cli.offline.replay_report import policy_figures
from eplb_service.cli.output.tables import compact_table
from eplb_service.placement import mean_par
from eplb_service.replay.assumptions import Assumption

if TYPE_CHECKING:
    from eplb_service.replay.result import Replay
    from eplb_service.replay.sweep import SweepCell


@dataclass(frozen=True)
class SweepRow:
    """One policy along one trace, by one choice of settings.

    Parameters
    ----------
    trace
        Its path.
    settings
        Those that are varied beside slots, window and interval.
    figures
        As documents have them.
    moves_each
        Moves of a decision.
    """

    trace: Path
    settings: Mapping[str, Any]
    figures: Mapping[str, Any]
    moves_each: float

    @classmethod
    def all_of(cls, cell: SweepCell, result: Replay) -> list[SweepRow]:
        """A row for each policy of a cell."""
        shape = {
            "layers": result.layers,
            "experts": result.experts,
            "ranks": result.ranks,
            "first_step_scored": result.first,
            "steps_scored": result.steps,
        }
        return [
            cls(
                cell.file.path,
                cell.varied,
                {**policy_figures(result, policy), **shape, "decisions_made": len(policy.decisions)},
                policy.moves_per_decision,
            )
            for policy in result.policies
        ]

    @property
    def choice(self) -> tuple[tuple[str, Any], ...]:
        """All that was chosen, by name."""
        setup = ("slots", "window_steps", "interval_steps")
        return (*((name, self.figures[name]) for name in setup), *self.settings.items())


def print_sweep(
    console: Console, rows: Sequence[SweepRow], rests_on: Sequence[Assumption], *, interrupted: bool
) -> None:
    """A table per trace, with a row per choice and policy, and where there are several traces their means."""
    varied = _varied(rows)
    traces = list(dict.fromkeys(row.trace for row in rows))
    console.print(
        ", ".join(
            _counted(count, noun)
            for count, noun in (
                (len(traces), "trace"),
                (len({row.choice for row in rows}), "setting"),
                (len({row.figures["policy"] for row in rows}), "policy"),
            )
        )
        + ("; stopped early, what had been done by then" if interrupted else "")
    )
    for trace in traces:
        console.print(
            _trace_table(trace, [row for row in rows if row.trace == trace], varied), soft_wrap=False
        )
    if len(traces) > 1 and not interrupted:
        console.print(_means_table(rows, varied), soft_wrap=False)
    console.print("PAR: hottest rank over mean rank in each step; alone: all experts left alone.")
    if any(row.figures["saved_ms_per_step"] or row.figures["moe_ms_per_step"] for row in rows):
        console.print(f"This rests on: {'; '.join(map(str, rests_on))}.", markup=False)


def sweep_document(
    rows: Sequence[SweepRow], rests_on: Sequence[Assumption], *, interrupted: bool
) -> dict[str, Any]:
    """Everything that a sweep found, with plain names and units in them."""
    return {
        "interrupted": interrupted,
        "assumptions": [asdict(assumption) for assumption in rests_on],
        "rows": [{"trace": str(row.trace), "settings": dict(row.settings), **row.figures} for row in rows],
    }


def _trace_table(trace: Path, rows: Sequence[SweepRow], varied: set[str]) -> Table:
    timed = rows[0].figures["moe_ms_per_step"] is not None
    columns = (*(["MoE ms"] if timed else []), "PAR", "alone", "moves each", "solve ms")
    table = compact_table("policy", *columns, title=str(trace))
    for row in rows:
        figures = row.figures
        table.add_row(
            _label(row, varied),
            *([f"{figures['moe_ms_per_step']:.3f}"] if timed else []),
            f"{figures['par_realised']:.3f}",
            f"{figures['par_left_alone']:.3f}",
            f"{row.moves_each:,.1f}",
            f"{figures['solve_ms_mean']:.1f}",
        )
    return table


def _means_table(rows: Sequence[SweepRow], varied: set[str]) -> Table:
    """Over all traces, the best choice first; of slots by their number, which may be others on another trace."""
    by_choice: dict[str, list[SweepRow]] = {}
    for row in rows:
        by_choice.setdefault(_label(row, varied), []).append(row)
    table = compact_table("mean over traces", "PAR", "alone", "traces")
    means = {label: _mean(of_label, "par_realised") for label, of_label in by_choice.items()}
    for label in sorted(means, key=means.__getitem__):
        of_label = by_choice[label]
        table.add_row(
            label, f"{means[label]:.3f}", f"{_mean(of_label, 'par_left_alone'):.3f}", f"{len(of_label)}"
        )
    return table


def _mean(rows: Sequence[SweepRow], name: str) -> float:
    return float(mean_par(np.array([row.figures[name] for row in rows])))


def _varied(rows: Sequence[SweepRow]) -> set[str]:
    """Names of what is not the same in all rows."""
    values: dict[str, set[Any]] = {}
    for row in rows:
        for name, value in row.choice:
            values.setdefault(name, set()).add(value)
    return {name for name, found in values.items() if len(found) > 1}


def _label(row: SweepRow, varied: set[str]) -> str:
    units = {"slots": "{} slots", "window_steps": "window {}", "interval_steps": "interval {}"}
    parts = [
        units.get(name, f"{name}={{}}").format(_text(value)) for name, value in row.choice if name in varied
    ]
    return ", ".join([row.figures["policy"], *parts])


def _counted(count: int, noun: str) -> str:
    """``1 trace``, ``2 policies``."""
    several = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else several}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
