"""Scoreboard of a demo, assembled step by step from the reports of all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, mean_par, par

_Int64 = npt.NDArray[np.int64]

_ROUNDING_STEPS = 64
"""Maximum effect of reordering sums on an output, as a multiple of the float32 epsilon times the largest output."""


class Scoreboard:
    """Loads, times and counts of all ranks. A step is included once all ranks have reported it.

    Parameters
    ----------
    ranks
        R, the number of ranks.
    layers
        L, the number of MoE layers.

    Examples
    --------
    Two ranks report one step of one layer, and the balanced (live) loads are 3 and 1 tokens:

    >>> board = Scoreboard(ranks=2, layers=1)
    >>> board.add({"rank": 0, "steps": [{"live_load": [3]}]})
    >>> board.steps
    0
    >>> board.add({"rank": 1, "steps": [{"live_load": [1]}]})
    >>> board.steps
    1
    >>> board.par("live")
    1.5
    """

    def __init__(self, ranks: int, layers: int) -> None:
        self.ranks = ranks
        self.layers = layers
        self._rows: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self._last: list[dict[str, Any]] = [{} for _ in range(ranks)]

    def add(self, line: dict[str, Any]) -> None:
        """Add one progress report of one rank."""
        rank = int(line["rank"])
        self._rows[rank] += line["steps"]
        self._last[rank] = line

    @property
    def steps(self) -> int:
        """Number of steps that all ranks have reported."""
        return min(len(rows) for rows in self._rows)

    @property
    def facts(self) -> dict[str, Any]:
        """Latest report from rank 0, for fields that are the same on all ranks."""
        return self._last[0]

    def column(self, name: str, last: int | None = None) -> list[list[Any]]:
        """Return the values of a field, indexed by rank and then by step, for all steps or only the ``last`` ones."""
        first = 0 if last is None else max(0, self.steps - last)
        return [[row[name] for row in rows[first : self.steps]] for rows in self._rows]

    def loads(self, kind: str, last: int | None = None) -> Float64:
        """Return the tokens per rank, ``[T, L, R]``.

        Parameters
        ----------
        kind
            ``live`` for the balanced layers, ``still`` for the unbalanced ones.
        last
            Number of most recent steps; ``None`` for all steps.
        """
        loads_RTL = np.asarray(self.column(f"{kind}_load", last), dtype=np.float64)
        return np.ascontiguousarray(loads_RTL.reshape(self.ranks, -1, self.layers).transpose(1, 2, 0))

    def source(self) -> _Int64:
        """Return the tokens by source rank and logical expert, ``[T, R, L, E]``."""
        return np.ascontiguousarray(np.asarray(self.column("source"), dtype=np.int64).swapaxes(0, 1))

    def counts(self) -> _Int64:
        """Return the heat: tokens by logical expert from all ranks, ``[T, L, E]``."""
        counts_TLE: _Int64 = self.source().sum(axis=1)
        return counts_TLE

    def par(self, kind: str, first: int = 0, last: int | None = None) -> float:
        """Return the PAR averaged over layers, or NaN if the steps have no tokens.

        Parameters
        ----------
        kind
            ``live`` for the balanced layers, ``still`` for the unbalanced ones.
        first
            First step.
        last
            End of the steps, exclusive; ``None`` for all reported steps.
        """
        return float(mean_par(par(self.loads(kind)[first:last]))) if self.steps > first else math.nan

    def milliseconds(self, kind: str) -> Float64:
        """Return each step's time on its slowest rank in milliseconds, ``[T]``.

        Parameters
        ----------
        kind
            ``live`` or ``still`` for the emulated device time of a step, ``agent`` for the agent's measured time.
        """
        slowest: Float64 = np.asarray(self.column(f"{kind}_ms"), dtype=np.float64).max(axis=0)
        return slowest

    def tokens_per_second(self, ms: float, first: int = 0) -> float:
        """Return the throughput of all ranks from step ``first`` if every step takes ``ms`` milliseconds."""
        tokens_RT = np.asarray(self.column("tokens"), dtype=np.float64)[:, first:]
        return float(tokens_RT.sum(axis=0).mean()) / ms * 1e3 if tokens_RT.size and ms else 0.0

    @property
    def first_switched_step(self) -> int | None:
        """First step that was served with a switched layer, or ``None`` if there is none."""
        epochs = self.column("epoch")[0]
        return next((step + 1 for step, epoch in enumerate(epochs) if epoch > 0), None)

    @property
    def layers_switched(self) -> int:
        """Number of layer updates that every rank has committed."""
        return min(int(line.get("layers_switched", 0)) for line in self._last)

    def total(self, name: str) -> int:
        """Return the sum of a counter over all ranks."""
        return sum(int(line.get(name, 0)) for line in self._last)

    @property
    def worst_difference(self) -> float:
        """Largest absolute difference between the outputs of the live (balanced) and still (unbalanced) layers."""
        return max(float(line.get("worst_difference", 0.0)) for line in self._last)

    @property
    def rounding_bound(self) -> float:
        """Upper bound on ``worst_difference`` if float32 rounding is its only cause."""
        largest = max(float(line.get("largest_output", 0.0)) for line in self._last)
        return _ROUNDING_STEPS * float(np.finfo(np.float32).eps) * max(largest, 1.0)

    @property
    def halted(self) -> str | None:
        """Reason why a rank stopped balancing, or ``None`` if none has."""
        return next((str(line["halted"]) for line in self._last if line.get("halted")), None)
