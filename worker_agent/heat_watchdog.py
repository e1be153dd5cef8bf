"""Notices what has silently stopped; a pure machine, fed at each step boundary."""

from __future__ import annotations


class HeatWatchdog:
    """Complains where no valid count of heat has come for ``deadline_steps`` steps.

    A host that stopped counting, or counts other steps than the agent sees, would otherwise look like a model at rest.
    """

    def __init__(self, deadline_steps: int) -> None:
        self._deadline_steps = deadline_steps
        self._seen_at = 0

    def seen(self, step: int) -> None:
        """Counts have come at this boundary."""
        self._seen_at = step

    def complaint(self, step: int) -> str | None:
        """What to report to the service, or ``None``."""
        if step - self._seen_at <= self._deadline_steps:
            return None
        return (
            f"no valid count of heat for {step - self._seen_at} steps: the layers count other steps than the agent "
            "sees"
        )
