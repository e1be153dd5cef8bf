"""When decisions fall along a trace."""

from __future__ import annotations

from dataclasses import dataclass


class ReplayError(ValueError):
    """A schedule that the trace cannot fill; the message says how long the trace is."""


@dataclass(frozen=True)
class Schedule:
    """When decisions fall.

    Parameters
    ----------
    window
        Steps that a decision looks at.
    interval
        Steps from one decision to the next.

    Raises ``ReplayError`` unless both are positive.
    """

    window: int
    interval: int

    def __post_init__(self) -> None:
        for name in ("window", "interval"):
            if getattr(self, name) < 1:
                raise ReplayError(f"{name} is {getattr(self, name)}; it must be at least one step")

    def decisions(self, steps: int) -> range:
        """Steps before which a decision falls; raises ``ReplayError`` where a trace of ``steps`` has none."""
        if steps <= self.window:
            raise ReplayError(
                f"the trace has {steps} steps, a window of {self.window} leaves none to score; "
                "use a shorter window"
            )
        return range(self.window, steps, self.interval)
