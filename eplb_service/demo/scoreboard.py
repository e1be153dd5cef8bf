"""What the ranks of a demo have reported, put together step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

_ROUNDING_STEPS = 64
"""Roundings of float32 that two orders of the same sums may be apart, relative to the largest output."""


class Scoreboard:
    """Loads, times and counts of R ranks over L layers; a step counts once all ranks have reported it."""

    def __init__(self, ranks: int, layers: int) -> None:
        self.ranks = ranks
        self.layers = layers
        self._rows: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self._last: list[dict[str, Any]] = [{} for _ in range(ranks)]

    def add(self, line: dict[str, Any]) -> None:
        """Take one progress line of one rank."""
        rank = int(line["rank"])
        self._rows[rank] += line["steps"]
        self._last[rank] = line

    @property
    def steps(self) -> int:
        """Steps that all ranks have reported."""
        return min(len(rows) for rows in self._rows)

    def loads(self, kind: str, last: int | None = None) -> Float64:
        """Tokens of each rank, ``[T, L, R]``, of all steps or the ``last`` ones; ``kind`` is ``live`` or ``still``."""
        first = 0 if last is None else max(0, self.steps - last)
        rows = [[row[f"{kind}_load"] for row in of_rank[first : self.steps]] for of_rank in self._rows]
        loads_RTL: Float64 = np.asarray(rows, dtype=np.float64).reshape(self.ranks, -1, self.layers)
        return np.ascontiguousarray(loads_RTL.transpose(1, 2, 0))

    def par(self, kind: str, first: int = 0, last: int | None = None) -> float:
        """Peak-to-average ratio per step, averaged over layers and over steps ``first`` to ``last``."""
        ratios_TL = step_par(self.loads(kind)[first:last])
        return float(ratios_TL.mean()) if ratios_TL.size else 1.0

    def milliseconds(self, kind: str) -> Float64:
        """Time of each step on its slowest rank, ``[T]``."""
        times = np.asarray([[row[f"{kind}_ms"] for row in rows[: self.steps]] for rows in self._rows])
        slowest: Float64 = times.max(axis=0)
        return slowest

    @property
    def first_switched_step(self) -> int | None:
        """First step that was served after a switch, or ``None``."""
        for step, row in enumerate(self._rows[0][: self.steps]):
            if row["epoch"] > 0:
                return step + 1
        return None

    @property
    def layers_switched(self) -> int:
        """Layer updates committed, as every rank has made them."""
        return min(int(line.get("layers_switched", 0)) for line in self._last)

    @property
    def experts_moved(self) -> int:
        """Experts received, over all ranks."""
        return sum(int(line.get("experts_received", 0)) for line in self._last)

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights received, over all ranks."""
        return sum(int(line.get("bytes_received", 0)) for line in self._last)

    @property
    def worst_difference(self) -> float:
        """Largest absolute difference between an output of the live layers and the still ones."""
        return max(float(line.get("worst_difference", 0.0)) for line in self._last)

    @property
    def rounding_bound(self) -> float:
        """What float32 rounding alone may make of ``worst_difference``."""
        largest = max(float(line.get("largest_output", 0.0)) for line in self._last)
        return _ROUNDING_STEPS * float(np.finfo(np.float32).eps) * max(largest, 1.0)

    @property
    def halted(self) -> str | None:
        """Why a rank has stopped balancing, or ``None``."""
        return next((str(line["halted"]) for line in self._last if line.get("halted")), None)


def step_par(loads_TLR: Float64) -> Float64:
    """Max over mean of the rank loads, ``[T, L]``; 1 where there are no tokens."""
    mean_TL = loads_TLR.mean(axis=2)
    ratios_TL: Float64 = np.where(mean_TL > 0, loads_TLR.max(axis=2) / np.where(mean_TL > 0, mean_TL, 1), 1.0)
    return ratios_TL
