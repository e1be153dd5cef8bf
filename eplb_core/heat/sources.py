"""Times and sources of a window's steps: wall time and tokens by step, tokens by source rank."""

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
"""Steps whose heat is planned for."""

RankSums: TypeAlias = tuple[npt.NDArray[np.float32], float]
"""One rank's tokens by expert, ``[L, E]``, and the steps that they count for; replaced, never written to."""


@dataclass(frozen=True)
class StepTimes:
    """Times and tokens of T steps in order, float64 ``[T]``.

    ``us_T`` are microseconds of wall time, the median over the ranks that measured it, NaN where none did; ``tokens_T``
    tokens of all ranks, each counted once, NaN where a rank did not report its own.
    """

    us_T: Float64
    tokens_T: Float64

    @property
    def served_T(self) -> npt.NDArray[np.bool_]:
        """Steps whose time is known and no wait for requests, bool ``[T]``: at most eight times the median."""
        return served_steps(self.us_T)

    @property
    def mean_us(self) -> float | None:
        """Mean over those steps, in microseconds; ``None`` where there is none."""
        served_T = self.served_T
        return float(self.us_T[served_T].mean()) if served_T.any() else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of those steps; ``None`` where not all are known."""
        tokens = self.tokens_T[self.served_T]
        return float(tokens.mean()) if tokens.size and np.isfinite(tokens).all() else None

    def newest(self, steps: int) -> StepTimes:
        """Return the newest steps' own."""
        first = len(self.us_T) - steps
        return StepTimes(self.us_T[first:], self.tokens_T[first:])


@dataclass(frozen=True)
class ServedSteps:
    """T steps in order as they were served, float64 ``[T]`` each.

    ``step_T`` are their numbers, ``us_T`` microseconds of wall time (NaN where no rank measured it), ``tokens_T`` the
    choices of all layers, and ``slowest_T`` the tokens of each layer's most loaded rank, summed over layers.
    """

    step_T: Float64
    us_T: Float64
    tokens_T: Float64
    slowest_T: Float64

    @property
    def steps(self) -> int:
        """T."""
        return len(self.step_T)

    def followed_by(self, later: ServedSteps, most: int) -> ServedSteps:
        """Return these and the steps of ``later`` that come after them, the newest ``most``."""
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
    """Tokens of each source rank by logical expert over about the newest ``window_steps``; older ones fade."""

    def __init__(self, ranks: int, window_steps: int) -> None:
        self._window_steps = window_steps
        self._sums_R: list[RankSums | None] = [None] * ranks

    def add(self, rank: int, report: HeatReport, phase: HeatPhase = "all") -> None:
        """Add what one rank's own tokens chose in its steps of ``phase``, if it reports that.

        Sums of a report count only if all its steps are of that phase.
        """
        of_phase_T = np.ones(report.steps, dtype=np.bool_)
        if phase != "all":
            phases = [one for one in StepPhase if one.prefills] if phase == "prefill" else [StepPhase.DECODE]
            of_phase_T = np.isin(report.phase_T, phases)
        steps_added = int(of_phase_T.sum())
        added_LE: npt.NDArray[np.integer[Any]] | None = report.source_sums_LE
        if report.source_counts_TLE is not None:
            added_LE = report.source_counts_TLE[of_phase_T].sum(axis=0, dtype=np.int64)
        elif steps_added < report.steps:
            return
        if added_LE is not None and steps_added:
            sums_LE, steps = self._sums_R[rank] or (np.zeros(added_LE.shape, dtype=np.float32), 0.0)
            kept = math.exp(-steps_added / self._window_steps)
            sums_LE = np.float32(kept) * sums_LE + added_LE.astype(np.float32)
            self._sums_R[rank] = sums_LE, kept * steps + steps_added

    def by_rank(self) -> tuple[RankSums, ...]:
        """Sums of all ranks, in order of rank; empty where one does not report its own tokens."""
        known = tuple(sums for sums in self._sums_R if sums is not None)
        return known if len(known) == len(self._sums_R) else ()
