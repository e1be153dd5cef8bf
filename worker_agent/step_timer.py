"""How long the model's steps take, by this host's clock; nothing here waits for a device.

A step's time is that from one call of the agent to the next: the forward pass as the host sees it, what the host does
between two passes, and what the agent's own call took. Where the host queues passes ahead of the device a single step's
time may be another's, but not their sum. It is wall time: a host that waits for requests waits in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StepTimer:
    """Microseconds from one step boundary to the next.

    Parameters
    ----------
    clock
        Nanoseconds that never go back.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began: int | None = None

    def lap(self, passes: int = 1) -> int:
        """Microseconds since the boundary before, at least 1; 0 where there was none, or other than one pass since.

        Parameters
        ----------
        passes
            Forward passes since the boundary before.
        """
        now, began = self._clock(), self._began
        self._began = now
        if began is None or passes != 1:
            return 0
        return max(1, (now - began) // 1000)

    def pause(self) -> None:
        """The model rests: the time until the next boundary is no step's."""
        self._began = None
