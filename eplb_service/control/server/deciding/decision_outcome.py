"""What comes of one decision, for operators and metrics."""

from __future__ import annotations

from dataclasses import dataclass

DECISION_RESULTS = ("plan", "kept", "dropped", "failed")
"""All that ``DecisionOutcome.result`` can be."""


@dataclass(frozen=True)
class DecisionOutcome:
    """What came of one decision.

    Parameters
    ----------
    result
        ``plan`` was offered, every layer ``kept``, a plan ``dropped`` before it was offered, or ``failed``.
    message
        The same for operators.
    plan_id, layers, moves
        Of the plan that was offered; 0 where none was.
    """

    result: str
    message: str
    plan_id: int = 0
    layers: int = 0
    moves: int = 0
