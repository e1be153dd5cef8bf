"""When decisions fall along a trace."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 512
"""Steps that a policy which decides on change remembers at least, as the service does in its default settings."""


class ReplayError(ValueError):
    """A replay that cannot be run as asked; the message says what was found and what to do."""


@dataclass(frozen=True)
class Schedule:
    """When decisions fall.

    Parameters
    ----------
    window
        Steps that a decision looks at, at most; beyond the interval those alone whose heat is still what it is now.
    interval
        Steps from one decision to the next.
    start
        Step of the first decision; ``None`` for the end of the first window or interval, whichever is shorter.

    Raises ``ReplayError`` unless window and interval are positive and the start is no earlier than that.
    """

    window: int
    interval: int
    start: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "interval"):
            if getattr(self, name) < 1:
                raise ReplayError(f"{name} is {getattr(self, name)}; it must be at least one step")
        if self.start is not None and self.start < self._earliest:
            raise ReplayError(f"start is {self.start}; the first window of {self._earliest} steps ends later")

    @property
    def first(self) -> int:
        """Step of the first decision."""
        return self._earliest if self.start is None else self.start

    @property
    def _earliest(self) -> int:
        return min(self.window, self.interval)

    def decisions(self, steps: int) -> range:
        """Steps before which a decision falls; raises ``ReplayError`` where a trace of ``steps`` has none."""
        if steps <= self.first:
            raise ReplayError(
                f"the trace has {steps} steps, a window of {self.first} leaves none to score; "
                "use a shorter window or interval"
            )
        return range(self.first, steps, self.interval)
