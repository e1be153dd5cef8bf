"""Writes a replay's report: one HTML file, with the command that makes it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import eplb_service
from eplb_service.atomic_write import write_atomically
from eplb_service.cli.errors import UserError
from eplb_service.cli.offline.resumable import command
from eplb_service.io.trace import Trace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.assumptions import Assumption
from eplb_service.replay.costs import Costs
from eplb_service.replay.result import Replay


def write_report(path: Path, replay: Replay, title: str, facts: dict[str, str]) -> None:
    """Write the report to ``path`` in one step; raises ``OutputError`` where the disk refuses."""
    from eplb_service.report.page import report_page

    write_atomically(path, report_page(replay, title=title, command=command(), facts=facts).encode())


def check_charts(folder: Path) -> None:
    """Raise ``UserError`` where no pictures can be written into ``folder``; called before long work begins."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--charts {folder}: exists and is not a folder")
    if not folder.resolve().parent.is_dir():
        raise UserError(
            f"--charts {folder}: the folder {folder.resolve().parent} does not exist; create it first"
        )


def write_charts(folder: Path, replay: Replay) -> None:
    """Write the charts as SVG into ``folder``; raises ``OutputError`` where the disk refuses."""
    from eplb_service.report.pictures import write_pictures

    write_pictures(folder, replay)


def report_facts(
    trace: Trace, settings: PlannerSettings, costs: Costs, rests_on: Sequence[Assumption]
) -> dict[str, str]:
    """What a reader must know to judge a report: the trace, the settings, the stated costs."""
    stated = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in ("policy", "threads")
    }
    return {
        "trace": f"{trace.facts.origin}; {trace.steps:,} steps, {trace.layers} layers, {trace.experts} experts"
        + ("" if trace.source_rows(0, 1) is None else f"; tokens by source of {trace.facts.ranks} ranks"),
        **({"batching": trace.facts.batching} if trace.facts.batching else {}),
        **({"model": trace.facts.model} if trace.facts.model else {}),
        "planner": ", ".join(
            f"{name} {_plain(value)}" for name, value in stated.items() if value is not None
        ),
        "costs": "; ".join(map(str, rests_on))
        if costs.step_ms or costs.curve is not None
        else "not stated: decisions take effect at once, and no times are given",
        "made by": f"eplb {eplb_service.__version__}",
    }


def _plain(value: object) -> str:
    """A setting as its option takes it."""
    if isinstance(value, tuple):
        return ",".join(f"{number:g}" for number in value)
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
