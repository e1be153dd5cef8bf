"""Step times and source heat of a window: wall time and tokens per step, and tokens per source rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core.cost.moving import served_steps
from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Float64

if TYPE_CHECKING:
    from eplb_core.wire.heat import HeatReport

HeatPhase: TypeAlias = Literal["all", "prefill", "decode"]
"""Phase of the steps that the planner optimises for."""

RankSums: TypeAlias = tuple[npt.NDArray[np.float32], float]
"""One rank's tokens by expert, ``[L, E]``, and the number of steps that they represent. They are replaced, never
modified."""


@dataclass(frozen=True)
class StepTimes:
    """Times and tokens of T consecutive steps.

    Parameters
    ----------
    us_T
        float64 ``[T]``, wall time in microseconds: the median over the ranks that measured it; NaN if no rank did.
    tokens_T
        float64 ``[T]``, tokens of all ranks, each counted once; NaN if a rank did not report its tokens.
    """

    us_T: Float64
    tokens_T: Float64

    @property
    def served_T(self) -> npt.NDArray[np.bool_]:
        """Mask, bool ``[T]``, of the steps with a known time that did not wait for requests; see ``served_steps``."""
        return served_steps(self.us_T)

    @property
    def mean_us(self) -> float | None:
        """Mean time of the steps in ``served_T``, in microseconds; ``None`` if there are no such steps."""
        served_T = self.served_T
        return float(self.us_T[served_T].mean()) if served_T.any() else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens per step over ``served_T``; ``None`` if there are no such steps or some counts are unknown."""
        tokens = self.tokens_T[self.served_T]
        return float(tokens.mean()) if tokens.size and np.isfinite(tokens).all() else None

    def newest(self, steps: int) -> StepTimes:
        """Return the times of the newest ``steps`` steps."""
        first = len(self.us_T) - steps
        return StepTimes(self.us_T[first:], self.tokens_T[first:])


@dataclass(frozen=True)
class ServedSteps:
    """Measurements of T steps in order, regardless of their placement.

    Parameters
    ----------
    step_T
        float64 ``[T]``, step numbers.
    us_T
        float64 ``[T]``, wall time in microseconds; NaN if no rank measured it.
    tokens_T
        float64 ``[T]``, expert choices (tokens times top-k) summed over layers.
    slowest_T
        float64 ``[T]``, tokens of each layer's most loaded rank, summed over layers.
    """

    step_T: Float64
    us_T: Float64
    tokens_T: Float64
    slowest_T: Float64

    @property
    def steps(self) -> int:
        """Number of steps, T."""
        return len(self.step_T)

    def followed_by(self, later: ServedSteps, most: int) -> ServedSteps:
        """Return these steps followed by the newer steps of ``later``, limited to the newest ``most`` steps."""
        last = self.step_T[-1] if self.steps else -math.inf
        new_T = later.step_T > last
        pairs = [
            (self.step_T, later.step_T),
            (self.us_T, later.us_T),
            (self.tokens_T, later.tokens_T),
            (self.slowest_T, later.slowest_T),
        ]
        return ServedSteps(*(np.concatenate([old_T, late_T[new_T]])[-most:] for old_T, late_T in pairs))


NO_STEPS = ServedSteps(*np.empty((4, 0)))


class SourceHeat:
    """Exponentially weighted source heat of all ranks.

    Parameters
    ----------
    ranks
        Number of ranks.
    window_steps
        Time constant: number of steps after which a step's weight has fallen to 1/e.
    """

    def __init__(self, ranks: int, window_steps: int) -> None:
        self._window_steps = window_steps
        self._sums_R: list[RankSums | None] = [None] * ranks

    def add(self, rank: int, report: HeatReport, phase: HeatPhase = "all") -> None:
        """Add a report's source heat, if there is any.

        Parameters
        ----------
        rank
            Rank that sent the report.
        report
            Heat report. A sum over several steps is used only if all of them are in ``phase``.
        phase
            Phase of the steps to add.
        """
        of_phase_T = np.ones(report.steps, dtype=np.bool_)
        if phase != "all":
            phases = [member for member in StepPhase if member.prefills]
            if phase == "decode":
                phases = [StepPhase.DECODE]
            of_phase_T = np.isin(report.phase_T, phases)
        new_steps = int(of_phase_T.sum())
        new_LE: npt.NDArray[np.integer[Any]] | None = report.source_sums_LE
        if report.source_counts_TLE is not None:
            new_LE = report.source_counts_TLE[of_phase_T].sum(axis=0, dtype=np.int64)
        elif new_steps < report.steps:
            return
        if new_LE is not None and new_steps:
            sums_LE, steps = self._sums_R[rank] or (np.zeros(new_LE.shape, dtype=np.float32), 0.0)
            decay = math.exp(-new_steps / self._window_steps)
            sums_LE = np.float32(decay) * sums_LE + new_LE.astype(np.float32)
            self._sums_R[rank] = sums_LE, decay * steps + new_steps

    def by_rank(self) -> tuple[RankSums, ...]:
        """Return the sums of all ranks in rank order; empty if any rank has not reported source heat."""
        reported = tuple(sums for sums in self._sums_R if sums is not None)
        return reported if len(reported) == len(self._sums_R) else ()
