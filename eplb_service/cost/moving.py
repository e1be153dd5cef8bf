"""Cost of moving weights while a model serves, estimated from what its ranks measured of their switches.

While a layer's weights travel, steps take longer, and its commit stops the model for a moment. So a switch loses the
time of the transfer, times the part of it by which steps were slowed, and the time of the commit. Each of the three is
taken from measurements as soon as there are enough, each by itself. Of ranks and switches medians count, which no
single report moves, and every estimate is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Float64

FEWEST_SWITCHES = 4
"""Layers' switches below which neither transfers nor commits count as measured."""
FEWEST_PLANS = 4
"""Plans below which nothing is said of slowed steps."""
WIDEST = 0.1
"""Half of the widest 95 % interval with which the part that steps are slowed by counts as measured."""
MOST_LOST = 0.9
"""Part that steps may seem to lose while weights travel; more is taken for something else."""
_EXPERT_SECONDS = (1e-6, 60.0)
"""Bounds of what an expert may seem to take: what lies beyond is a clock's fault."""
_MOST_COMMIT_SECONDS = 10.0
"""Bound of what a commit may seem to take."""
_CONFIDENCE = 0.95
"""Of the intervals."""
_PAUSE = 8.0
"""Medians from which on a step's time is taken for a wait for requests."""
_NEAR = 64
"""Steps beside a plan's that its own are compared with, at most."""
_FEWEST_CALM = 8
"""Steps beside a plan's below which its own are compared with none."""


@dataclass(frozen=True)
class Switch:
    """One layer's switch, medians over its ranks; NaN where none reported it.

    Parameters
    ----------
    expert_seconds
        Seconds for each expert that a rank received, of the ranks that received any.
    transfer_seconds
        From the first byte to the last, of the same.
    commit_seconds
        In which the model stood still.
    after_step, by_step
        Step boundaries between which the weights travelled.
    """

    expert_seconds: float
    transfer_seconds: float
    commit_seconds: float
    after_step: int
    by_step: int


@dataclass(frozen=True)
class SwitchedPlan:
    """A plan's switches, from the step boundary at which ranks took it to the one after which it was done."""

    plan_id: int
    first_step: int
    end_step: int
    switches: tuple[Switch, ...]


class Slowdown(NamedTuple):
    """Part of the time while one plan's weights travelled that steps lost, and how many steps those are.

    Negative where they happened to be faster than those before and after it.
    """

    lost_share: float
    steps: int


@dataclass(frozen=True)
class MovingCosts:
    """Measured costs of moves; ``None`` for what has not been measured often enough.

    Parameters
    ----------
    expert_seconds, transfers
        For each expert that a rank receives, and of how many layers' transfers that is the median.
    lost_share, lost_low, lost_high, plans
        Part of that time that steps lose, with its 95 % interval, and of how many plans.
    commit_seconds, commits
        Of a layer's switch, and of how many that is the median.
    bounded
        Whether any of these is where it is only because nothing beyond is believed.
    layer_ms, layer_source
        Milliseconds that one layer's experts take in a step, which is what moves may win a part of, and its origin.
    """

    expert_seconds: float | None = None
    transfers: int = 0
    lost_share: float | None = None
    lost_low: float = math.nan
    lost_high: float = math.nan
    plans: int = 0
    commit_seconds: float | None = None
    commits: int = 0
    bounded: bool = False
    layer_ms: float | None = None
    layer_source: str = ""


NOTHING_MEASURED = MovingCosts()


def moving_costs(switches: Sequence[Switch], slowdowns: Sequence[Slowdown]) -> MovingCosts:
    """Costs that these switches, and the steps beside them, speak for."""
    seconds, commits = (
        [value for switch in switches if math.isfinite(value := getattr(switch, name))]
        for name in ("expert_seconds", "commit_seconds")
    )
    share = _lost_share(slowdowns)
    lost, low, high = (None, math.nan, math.nan) if share is None else share
    found = _median(seconds), lost, _median(commits)
    bounds = _EXPERT_SECONDS, (0.0, MOST_LOST), (0.0, _MOST_COMMIT_SECONDS)
    expert, lost, commit = (
        None if value is None else min(max(value, least), most)
        for value, (least, most) in zip(found, bounds, strict=True)
    )
    return MovingCosts(
        expert_seconds=expert,
        transfers=len(seconds),
        lost_share=lost,
        lost_low=low,
        lost_high=high,
        plans=len(slowdowns),
        commit_seconds=commit,
        commits=len(commits),
        # That steps seem a little faster while weights travel is what noise makes of no cost, no report to be doubted.
        bounded=(expert, commit) != (found[0], found[2]) or (share is not None and share[0] > MOST_LOST),
    )


def calm_steps(step_T: Float64, us_T: Float64, plans: Sequence[SwitchedPlan]) -> float | None:
    """Mean time of the newest steps of known time in which no plan was under way; ``None`` where they are too few."""
    kept_T = served_steps(us_T)
    for plan in plans:
        kept_T &= (step_T < plan.first_step) | (step_T >= plan.end_step)
    return _mean(us_T[kept_T][-_NEAR:])


def slowdown_of(
    plan: SwitchedPlan,
    others: Sequence[SwitchedPlan],
    before_us: float | None,
    step_T: Float64,
    us_T: Float64,
) -> Slowdown | None:
    """Part of the time that steps lost while a plan's weights travelled, beside just before and just after it.

    A plan makes steps faster, as a rule, so those on both sides count alike; where one side is not known the other has
    to do.

    Parameters
    ----------
    plan, others
        The plan, and those whose steps are no measure of anything.
    before_us
        Time of the steps before it.
    step_T, us_T
        float64 ``[T]``, numbers of steps in order, and their wall time in microseconds; NaN where not known.

    Returns
    -------
    Slowdown | None
        ``None`` where no step is known in which weights travelled, or too few beside them.
    """
    served_T = served_steps(us_T)
    moving_T = np.zeros(len(step_T), dtype=bool)
    for switch in plan.switches:
        moving_T |= _travelled(switch, step_T, us_T)
    moving_K = us_T[moving_T & served_T]
    end = min([other.first_step for other in others if other.first_step >= plan.end_step], default=math.inf)
    after_us = _mean(us_T[served_T & (step_T >= plan.end_step) & (step_T < end)][:_NEAR])
    calm = [us for us in (before_us, after_us) if us is not None]
    if not moving_K.size or not calm:
        return None
    return Slowdown(1.0 - sum(calm) / len(calm) / float(moving_K.mean()), moving_K.size)


def _travelled(switch: Switch, step_T: Float64, us_T: Float64) -> npt.NDArray[np.bool_]:
    """Steps in which a layer's weights travelled, bool ``[T]``: the last ones that take as long as the transfer did."""
    between_T = (step_T > switch.after_step) & (step_T < switch.by_step)
    if not math.isfinite(switch.transfer_seconds) or not between_T.any():
        return np.zeros(len(step_T), dtype=bool)
    us_between_T = np.where(between_T, np.nan_to_num(us_T), 0.0)
    later_T = us_between_T[::-1].cumsum()[::-1] - us_between_T
    travelled_T: npt.NDArray[np.bool_] = between_T & (later_T < switch.transfer_seconds * 1e6)
    return travelled_T


def served_steps(us_T: Float64) -> npt.NDArray[np.bool_]:
    """Steps whose time is known and no wait for requests, bool ``[T]``: at most eight times the median."""
    known_T = np.isfinite(us_T)
    if not known_T.any():
        return known_T
    served_T: npt.NDArray[np.bool_] = known_T & (
        np.nan_to_num(us_T, nan=np.inf) <= _PAUSE * np.median(us_T[known_T])
    )
    return served_T


def _mean(us_K: Float64) -> float | None:
    return float(us_K.mean()) if len(us_K) >= _FEWEST_CALM else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) >= FEWEST_SWITCHES else None


def _lost_share(slowdowns: Sequence[Slowdown]) -> tuple[float, float, float] | None:
    """Mean over the plans by their steps, with its interval by Student's t; ``None`` where that is too wide to say."""
    if len(slowdowns) < FEWEST_PLANS:
        return None
    share_P, weight_P = np.array(slowdowns, dtype=np.float64).T
    weight_P = weight_P / weight_P.sum()
    mean = float(weight_P @ share_P)
    plans = len(share_P)
    error = math.sqrt(float((weight_P**2) @ (share_P - mean) ** 2) * plans / (plans - 1))
    reach = _student(plans - 1) * error
    return (mean, mean - reach, mean + reach) if reach <= WIDEST else None


def _student(freedom: int) -> float:
    """Standard errors from the mean to the ends of its interval, by an expansion that is 4 % short at three.

    References
    ----------
    M. Abramowitz, I. Stegun, *Handbook of Mathematical Functions*, 26.7.5.
    """
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
