"""Proof that balancing helps: all arms serve the same steps and are compared block by block, with intervals.

The arms are the initial placement (``off``), other balancers, this project's planner (``ours``), the deployment as it
was recorded, and forced balance. Forced balance gives every rank the same number of tokens, which changes the model's
tokens, so it is only computed and never served. No placement can gain more, so forced balance is the upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from eplb_core.cost.curve import CostCurve
from eplb_core.cost.moving import student_t_975
from eplb_core.heat.window import Counts
from eplb_core.placement import Float64, mean_par, peak_par, step_par
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.trace import Trace
from eplb_service.replay.jobs import OnProgress, TraceFile, replay_file
from eplb_service.replay.loop import Scene
from eplb_service.replay.moves import arrivals
from eplb_service.replay.policy import Job, Setup
from eplb_service.replay.result import PolicyReplay, Replay

OFF = "off"
OURS = "ours"
AS_SERVED = "as served"
FORCED = "forced balance"
BLOCKS = 16
"""Number of blocks of consecutive steps: four groups of four for ABBA. With more blocks, neighbouring blocks would be
correlated.
"""
MIN_STEPS = 64
"""Minimum number of scored steps, four per block."""
_CHUNK_STEPS = 64


class ProofError(ValueError):
    """Raised if a proof cannot be made. The error message states the reason and the remedy."""


@dataclass(frozen=True)
class Estimate:
    """Mean and its 95 % interval. The bounds are NaN if there are too few values for an interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Arm:
    """A way of balancing, scored on all steps.

    Parameters
    ----------
    name
        Name in tables and JSON.
    note
        Description of the arm.
    par_T
        float64 ``[T]``, PAR of each step, averaged over the layers; NaN for a step without tokens.
    us_T
        float64 ``[T]``, time of the slowest ranks of all layers in each step, in microseconds; ``None`` if unknown.
    moves
        Number of slots that received weights; ``None`` if the arm cannot be served.
    """

    name: str
    note: str
    par_T: Float64
    us_T: Float64 | None = None
    moves: int | None = None


@dataclass(frozen=True)
class Proof:
    """Comparison of arms that are scored on the same steps.

    Parameters
    ----------
    arms
        ``off`` first, then other balancers, ``ours``, the deployment as served if recorded, and forced balance last.
    replay
        Replay that produced ``off``, the other balancers and ``ours``.
    setup
        Slots and schedule of all arms.
    """

    arms: tuple[Arm, ...]
    replay: Replay
    setup: Setup

    def arm(self, name: str) -> Arm:
        """Return the arm with this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def par_B(self, arm: Arm) -> Float64:
        """Return the PAR of each block, float64 ``[B]``."""
        return block_means(arm.par_T)

    @property
    def block_steps(self) -> list[int]:
        """First step of each block."""
        return [self.replay.first + begin for begin in _bounds(self.replay.steps)[:-1]]

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each arm, keyed by JSON key.

        ``gain`` is the PAR reduction compared with ``off`` on the same blocks. ``abba`` is the same reduction if each
        block is served by only one of the two arms. ``share`` is the gain as a share of forced balance's gain.
        ``above_ours`` is the arm's PAR minus the PAR of ``ours``.
        """
        off, ceiling = self.arms[0], self.arms[-1]
        off_B, ours_B = self.par_B(off), self.par_B(self.arm(OURS))
        rows = []
        for arm in self.arms:
            arm_B = self.par_B(arm)
            is_off = arm is off
            rows.append(
                {
                    "arm": arm.name,
                    "note": arm.note,
                    "par": float(mean_par(arm_B)),
                    "gain": None if is_off else interval(off_B - arm_B),
                    "abba": None if is_off else interval(abba(off_B, arm_B)),
                    "share": None if is_off else share(off_B - arm_B, off_B - self.par_B(ceiling)),
                    "above_ours": None if arm.name == OURS else interval(arm_B - ours_B),
                    "moe_ms": None if arm.us_T is None else float(arm.us_T.mean()) / 1e3,
                    "saved_ms": None if is_off else self._saved_ms(off, arm),
                    "moves": arm.moves,
                    "bytes_moved": arm.moves and arm.moves * self.replay.costs.bytes_per_expert,
                }
            )
        return rows

    def _saved_ms(self, off: Arm, arm: Arm) -> Estimate | None:
        """Return the milliseconds per step that an arm saves; ``None`` if there is no cost curve."""
        if off.us_T is None or arm.us_T is None:
            return None
        return interval(block_means(off.us_T - arm.us_T) / 1e3)


def prove(
    file: TraceFile,
    scene: Scene,
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> Proof:
    """Replay the arms on a trace, and add the arms that need no replay.

    Parameters
    ----------
    file
        The trace.
    scene
        Ranks, costs and initial placement.
    jobs
        Jobs from ``proof_jobs``.
    workers, on_progress
        As for ``replay_file``.

    Returns
    -------
    Proof
        All arms, scored on the steps after the first window.

    Raises
    ------
    ProofError
        If there are too few steps after the first window.
    KeyboardInterrupt
        If the replay was interrupted before every arm had finished.
    """
    replay = replay_file(file, jobs, scene, workers=workers, on_progress=on_progress)
    if replay.interrupted:
        raise KeyboardInterrupt
    setup = jobs[0].setup
    trace = file.open()
    arms = [
        _replayed(
            replay.baselines[0], f"the initial placement, never changed; split {jobs[0].settings.split}", OFF
        )
    ]
    arms += [_replayed(policy, _note(job)) for policy, job in zip(replay.policies, jobs[1:], strict=True)]
    served = as_served(trace, setup, scene)
    arms += [] if served is None else [served]
    return Proof((*arms, forced_balance(trace, setup, scene)), replay, setup)


def proof_jobs(
    balancers: Sequence[str], setup: Setup, settings: PlannerSettings, engine_split: str, steps: int
) -> list[Job]:
    """Return the jobs of a proof: ``off``, the balancers and ``ours``.

    Parameters
    ----------
    balancers
        Policies to compare with, as for ``--policy``.
    setup
        Slots and schedule.
    settings
        Settings of this project's planner.
    engine_split
        Split of tokens over replicas under ``off`` and the balancers, one of ``settings.SPLITS``.
    steps
        Number of steps of the trace.

    Returns
    -------
    list of Job
        Jobs for ``prove``.

    Raises
    ------
    ProofError
        If the trace has too few steps after the first window.
    ReplayError
        If a policy does not exist.
    """
    _check_steps(steps - setup.first)
    engine = replace(settings, split=engine_split)
    others = [Job.of(name, setup, name, engine) for name in balancers]
    return [Job(OFF, setup, "", engine), *others, Job.of(OURS, setup, "flashlb", settings)]


def _note(job: Job) -> str:
    if job.label == OURS:
        return f"this project's planner; split {job.settings.split}"
    return f"the balancer {job.policy} at every interval; split {job.settings.split}"


def _replayed(policy: PolicyReplay, note: str, name: str = "") -> Arm:
    decisions = policy.decisions
    us = [decision.us_T for decision in decisions if decision.us_T is not None]
    par_T = np.concatenate([decision.par_T for decision in decisions])
    return Arm(name or policy.label, note, par_T, np.concatenate(us) if us else None, policy.moves)


def as_served(trace: Trace, setup: Setup, scene: Scene) -> Arm | None:
    """Return the arm of the recorded deployment, or ``None`` if the trace has no rank loads recorded for this shape."""
    shape = (trace.facts.ranks, trace.facts.slots)
    if shape != (scene.topology.ranks, setup.slots):
        return None
    par_T = []
    for first, end in _chunks(setup.first, trace.steps):
        loads_TLR = trace.served_loads(first, end)
        if loads_TLR is None:
            return None
        par_T.append(mean_par(step_par(loads_TLR), axis=1))
    moves = sum(
        int(arrivals(before_RS[None], after_RS[None]).sum())
        for placements in trace.served_placements(setup.first, trace.steps)
        for before_RS, after_RS in pairwise(placements)
    )
    return Arm(
        AS_SERVED, "the deployment's balance and moves as recorded", np.concatenate(par_T), None, moves
    )


def forced_balance(trace: Trace, setup: Setup, scene: Scene) -> Arm:
    """Return the upper bound: each step's tokens are dealt out to all slots, so ranks differ by at most one token."""
    ranks = scene.topology.ranks
    curve = scene.costs.curve
    par, us = [], []
    for first, end in _chunks(setup.first, trace.steps):
        par_TL, us_TL = _forced(trace.heat(first, end), ranks, setup.slots, curve)
        par.append(mean_par(par_TL, axis=1))
        us.append(us_TL.sum(axis=1))
    us_T = None if curve is None else np.concatenate(us)
    return Arm(
        FORCED,
        "every rank gets the same number of tokens; only computed, because it changes the model's tokens",
        np.concatenate(par),
        us_T,
    )


def _forced(heat_TLE: Counts, ranks: int, slots: int, curve: CostCurve | None) -> tuple[Float64, Float64]:
    """Return the PAR and the slowest rank's time of each step and layer under forced balance, float64 ``[T, L]``."""
    tokens_TL = heat_TLE.sum(axis=2, dtype=np.float64)
    each_TL = np.floor(tokens_TL / (ranks * slots))
    # The remainder is dealt out to the ranks in turn, so this many slots of the busiest rank get one extra token.
    fuller_TL = np.ceil((tokens_TL - each_TL * ranks * slots) / ranks)
    busiest_TLS = each_TL[..., None] + (np.arange(slots) < fuller_TL[..., None])
    par_TL = peak_par(busiest_TLS.sum(axis=2), tokens_TL, ranks)
    if curve is None:
        return par_TL, np.zeros_like(par_TL)
    us_TL = curve.rank_us(busiest_TLS) + curve.batch_us * tokens_TL
    return par_TL, np.where(tokens_TL > 0, us_TL, 0.0)


def _chunks(first: int, end: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(end, begin + _CHUNK_STEPS)) for begin in range(first, end, _CHUNK_STEPS))


def _check_steps(steps: int) -> None:
    """Raise ``ProofError`` if there are too few scored steps."""
    if steps < MIN_STEPS:
        raise ProofError(
            f"{max(0, steps)} steps follow the first window, but a proof needs at least {MIN_STEPS}; record more "
            "steps, or use a shorter --window or --interval"
        )


def _bounds(steps: int) -> list[int]:
    bounds: list[int] = np.linspace(0, steps, BLOCKS + 1).astype(int).tolist()
    return bounds


def block_means(values_T: Float64) -> Float64:
    """Return the mean of the values in each of ``BLOCKS`` nearly equal blocks, float64 ``[B]``, ignoring NaN."""
    bounds = _bounds(len(values_T))
    return np.array([float(mean_par(values_T[begin:end])) for begin, end in pairwise(bounds)])


def abba(base_B: Float64, arm_B: Float64) -> Float64:
    """Return the gain of each group of four blocks, served in the order base, arm, arm, base, float64 ``[B / 4]``.

    A linear trend in the load cancels out within each group.

    Examples
    --------
    The load rises by 1 per block, and the arm gains 0.5:

    >>> base_B = np.array([1.0, 2.0, 3.0, 4.0])
    >>> abba(base_B, base_B - 0.5)
    array([0.5])
    """
    base_G4, arm_G4 = base_B.reshape(-1, 4), arm_B.reshape(-1, 4)
    gain_G: Float64 = base_G4[:, [0, 3]].mean(axis=1) - arm_G4[:, [1, 2]].mean(axis=1)
    return gain_G


def interval(values_B: Float64) -> Estimate:
    """Return the mean of the blocks' values and its 95 % interval from Student's t-distribution.

    Correlated blocks are modelled as a first-order autoregressive process, and the interval is computed for the number
    of independent blocks that carry the same information. The correlation is corrected for its bias in short series.

    Examples
    --------
    >>> estimate = interval(np.array([0.4, 0.5, 0.6, 0.5, 0.4, 0.6, 0.5, 0.5]))
    >>> round(estimate.value, 2), round(estimate.low, 2), round(estimate.high, 2)
    (0.5, 0.44, 0.56)

    References
    ----------
    M. G. Kendall, *Note on Bias in the Estimation of Autocorrelation*, 1954.
    """
    values_B = values_B[np.isfinite(values_B)]
    if not values_B.size:
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(values_B.mean())
    if values_B.size < 3:
        return Estimate(mean, math.nan, math.nan)
    off_B = values_B - mean
    squares = float(off_B @ off_B)
    correlation = float(off_B[1:] @ off_B[:-1]) / squares if squares else 0.0
    # For short series, this estimate of the correlation is too low, by about (1 + 4 x correlation) / blocks.
    correlation = min(max(0.0, correlation + (1 + 4 * correlation) / values_B.size), 0.99)
    independent = max(3.0, values_B.size * (1 - correlation) / (1 + correlation))
    error = math.sqrt(squares / (values_B.size - 1) / independent)
    reach = student_t_975(independent - 1) * error
    return Estimate(mean, mean - reach, mean + reach)


def share(gain_B: Float64, possible_B: Float64) -> Estimate:
    """Return the share of the possible gain that was achieved, with the interval of the ratio of two means.

    Examples
    --------
    >>> share(np.full(16, 0.2), np.full(16, 0.4))
    Estimate(value=0.5, low=0.5, high=0.5)
    """
    possible = float(mean_par(possible_B))
    if not possible > 0:
        return Estimate(math.nan, math.nan, math.nan)
    ratio = float(mean_par(gain_B)) / possible
    error = interval((gain_B - ratio * possible_B) / possible)
    return Estimate(ratio, ratio + error.low, ratio + error.high)
