"""Reports as a table and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from eplb_lab.conformance.run import Outcome, Report

HEADER = f"{'scenario':<22} {'result':<13} {'moves':>5} {'slots':>6} {'tokens':>7} {'largest':>8} {'ties':>4}"


def row(outcome: Outcome) -> str:
    """Return the table row of an outcome, followed by its detail on an indented line.

    Examples
    --------
    >>> print(row(Outcome("sleep", "not possible", detail="no sleep mode")))
    sleep                  not possible
        no sleep mode
    """
    line = f"{outcome.name:<22} {outcome.verdict:<13}"
    if outcome.tokens:
        line += f" {outcome.moves:>5} {outcome.experts:>6} {outcome.tokens:>7}"
        line += f" {outcome.largest:>8.1e} {outcome.ties:>4}"
    line = line.rstrip()
    return f"{line}\n    {outcome.detail}" if outcome.detail else line


def conclusion(report: Report) -> str:
    """Return the last line of the table."""
    counts = {
        verdict: sum(outcome.verdict == verdict for outcome in report.outcomes)
        for verdict in dict.fromkeys(outcome.verdict for outcome in report.outcomes)
    }
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{report.engine}: {'passed' if report.passed else 'FAILED'} ({listed})"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as values for JSON."""
    outcomes = [dataclasses.asdict(outcome) for outcome in report.outcomes]
    return {"engine": report.engine, "passed": report.passed, "outcomes": outcomes}
