"""Orders for an engine's EPLB, exchanged through files in one folder.

The kit writes ``order-N.json``. The first rank reads them in order, one per rearrangement, and sends each to all ranks,
so that all ranks adopt the same placement in the same step. ``state.json`` contains the first rank's progress.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "CONFORMANCE_FOLDER"
"""Environment variable that names the folder. If it is not set, the plugins do nothing."""
CONTROL = "CONFORMANCE_CONTROL"
"""Environment variable that names the deliberate fault."""
STATE = "state.json"
FIRST_WEIGHT = "weight"
LAST_WEIGHT = "last-weight"
TABLE = "table"


def order_file(number: int) -> str:
    """Return the name of the order with this number. The first is 1."""
    return f"order-{number:06}.json"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: readers see either the complete file or none."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def left_behind(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the index of the weight tensor that the control leaves behind, or None."""
    return {FIRST_WEIGHT: 0, LAST_WEIGHT: -1}.get(environment.get(CONTROL, ""))


class Orders:
    """The ordered placements, as the EPLB policy of each rank sees them.

    Parameters
    ----------
    folder
        Folder of the orders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken = 0
        self._adopted = 0
        self._skipped = 0
        self._pending: list[list[int]] | None = None
        self._shape: tuple[int, int] | None = None

    def decide(
        self, current: list[list[int]], rank: int, send: Callable[[list[Any]], None]
    ) -> list[list[int]]:
        """Return the placement for a rearrangement: the next order, or the current placement.

        Parameters
        ----------
        current
            The engine's placement, ``[L][P]``.
        rank
            This rank. Rank 0 reads the orders.
        send
            Function that replaces the value in a one-element list with rank 0's value, on all ranks.
        """
        shape = (len(current), len(current[0]))
        self._shape = self._shape or shape
        if shape != self._shape:  # a draft model, whose experts do not move
            return current
        box: list[Any] = [self._next(current) if rank == 0 else None]
        send(box)
        return current if box[0] is None else box[0]

    def _next(self, current: list[list[int]]) -> list[list[int]] | None:
        if self._pending is not None:
            if self._pending == current:
                self._adopted += 1
            else:
                self._skipped = self._taken
            self._pending = None
        path = self._folder / order_file(self._taken + 1)
        if path.exists():
            self._taken += 1
            self._pending = json.loads(path.read_text())
        state = {"adopted": self._adopted, "skipped": self._skipped, "placement": current}
        write_json(self._folder / STATE, state)
        return self._pending
