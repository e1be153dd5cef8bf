"""Checks an engine's environment before it serves with the agent: ``eplb-agent-doctor``; this part needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "FAILED", "skipped"
"""Verdicts of findings."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: its name, a verdict, and figures or what is wrong and what to do."""

    name: str
    verdict: str
    text: str
