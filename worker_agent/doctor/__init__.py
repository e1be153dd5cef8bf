"""``eplb-agent-doctor``: check an engine's environment before it serves with the agent. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"
FAILED = "FAILED"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Parameters
    ----------
    name
        Name of the check.
    verdict
        ``OK``, ``WARNING``, ``FAILED`` or ``SKIPPED``.
    text
        Measured figures, or the problem and its remedy.
    """

    name: str
    verdict: str
    text: str
