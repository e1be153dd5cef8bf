"""Reports of a demo's ranks, put together step by step, and written as a trace."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, mean_par, par

_Int64 = npt.NDArray[np.int64]

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

    @property
    def facts(self) -> dict[str, Any]:
        """The newest line of rank 0, for what all ranks report alike."""
        return self._last[0]

    def column(self, name: str, last: int | None = None) -> list[list[Any]]:
        """Values under a name by rank and step, of all steps or the ``last`` ones."""
        first = 0 if last is None else max(0, self.steps - last)
        return [[row[name] for row in rows[first : self.steps]] for rows in self._rows]

    def loads(self, kind: str, last: int | None = None) -> Float64:
        """Tokens of each rank, ``[T, L, R]``, of all steps or the ``last`` ones; ``kind`` is ``live`` or ``still``."""
        loads_RTL = np.asarray(self.column(f"{kind}_load", last), dtype=np.float64)
        return np.ascontiguousarray(loads_RTL.reshape(self.ranks, -1, self.layers).transpose(1, 2, 0))

    def source(self) -> _Int64:
        """Tokens of each source rank by logical expert, ``[T, R, L, E]``."""
        return np.ascontiguousarray(np.asarray(self.column("source"), dtype=np.int64).swapaxes(0, 1))

    def counts(self) -> _Int64:
        """Tokens by logical expert from all ranks, ``[T, L, E]``."""
        counts_TLE: _Int64 = self.source().sum(axis=1)
        return counts_TLE

    def par(self, kind: str, first: int = 0, last: int | None = None) -> float:
        """Peak-to-average ratio of steps ``first`` to ``last``, mean over layers; NaN where there are no tokens."""
        return float(mean_par(par(self.loads(kind)[first:last]))) if self.steps > first else math.nan

    def milliseconds(self, kind: str) -> Float64:
        """Return each step's time on its slowest rank, ``[T]``: of a device, ``live`` or ``still``; or ``agent``."""
        slowest: Float64 = np.asarray(self.column(f"{kind}_ms"), dtype=np.float64).max(axis=0)
        return slowest

    def tokens_per_second(self, ms: float, first: int = 0) -> float:
        """Return the throughput of all ranks from step ``first`` on, if steps take ``ms`` milliseconds."""
        tokens_RT = np.asarray(self.column("tokens"), dtype=np.float64)[:, first:]
        return float(tokens_RT.sum(axis=0).mean()) / ms * 1e3 if tokens_RT.size and ms else 0.0

    @property
    def first_switched_step(self) -> int | None:
        """First step that was served after a switch, or ``None``."""
        epochs = self.column("epoch")[0]
        return next((step + 1 for step, epoch in enumerate(epochs) if epoch > 0), None)

    @property
    def layers_switched(self) -> int:
        """Layer updates committed, as every rank has made them."""
        return min(int(line.get("layers_switched", 0)) for line in self._last)

    def total(self, name: str) -> int:
        """Sum of a counter over all ranks."""
        return sum(int(line.get(name, 0)) for line in self._last)

    @property
    def worst_difference(self) -> float:
        """Largest absolute difference between an output of the live layers and the still ones."""
        return max(float(line.get("worst_difference", 0.0)) for line in self._last)

    @property
    def rounding_bound(self) -> float:
        """Most that float32 rounding alone makes of ``worst_difference``."""
        largest = max(float(line.get("largest_output", 0.0)) for line in self._last)
        return _ROUNDING_STEPS * float(np.finfo(np.float32).eps) * max(largest, 1.0)

    @property
    def halted(self) -> str | None:
        """Reason why a rank has stopped balancing, or ``None``."""
        return next((str(line["halted"]) for line in self._last if line.get("halted")), None)
