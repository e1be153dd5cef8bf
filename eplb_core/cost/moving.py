"""Cost of moving experts while a model serves, estimated from the ranks' measurements of past switches.

Steps take longer while the weights of a layer are transferred, and its commit pauses the model briefly. A switch
therefore costs the transfer time, multiplied by the fraction of it that is lost to slower steps, plus the commit time.
Each of these three values is measured independently of the others as soon as there are enough samples. Estimates use
medians over ranks and switches, so that a single report cannot change them much, and every estimate is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64

MIN_SAMPLES = 4
"""Minimum number of layer switches, or of plans, required for an estimate."""
MAX_RELATIVE_ERROR = 0.1
"""Largest accepted half-width of the 95 % confidence interval of the lost fraction of a transfer."""
MAX_LOST = 0.9
"""Upper bound on the lost fraction of a transfer. A larger loss must have a different cause."""
_EXPERT_SECONDS = (1e-6, 60.0)
"""Bounds on the transfer time of an expert, in seconds. Values outside these bounds come from a faulty clock."""
_COMMIT_SECONDS = (0.0, 10.0)
"""Bounds on the commit time, in seconds."""
_PAUSE = 8.0
"""A step counts as waiting for requests if it takes longer than this multiple of the median."""
_NEAR = 64
"""Maximum number of reference steps on each side of a plan."""
_MIN_CALM_STEPS = 8
"""Minimum number of reference steps required for a comparison."""


@dataclass(frozen=True)
class Switch:
    """Measurements of one layer's switch: medians over its ranks; NaN if no rank reported a value.

    Parameters
    ----------
    expert_seconds
        Seconds per received expert, on the ranks that received at least one.
    transfer_seconds
        Seconds from the first to the last byte on these ranks, for all layers that were transferred together.
    commit_seconds
        The layer's share of the time for which the commit paused the model.
    after_step
        Step boundary after which the transfer began.
    by_step
        First step boundary after the end of the transfer.
    """

    expert_seconds: float
    transfer_seconds: float
    commit_seconds: float
    after_step: float
    by_step: float


@dataclass(frozen=True)
class SwitchEffect:
    """Measured effect of one plan: mean differences per step between the steps before and after it.

    Parameters
    ----------
    us_saved
        Reduction of the step time, in microseconds.
    tokens_saved
        Reduction of the tokens of each layer's most loaded rank, summed over layers.
    steps
        Number of compared steps: the smaller of the step counts before and after the plan.
    """

    us_saved: float
    tokens_saved: float
    steps: int


@dataclass(frozen=True)
class SwitchedPlan:
    """A plan and its switches.

    Parameters
    ----------
    first_step
        Step boundary at which the ranks received the plan.
    end_step
        Step boundary after the last switch.
    switches
        Switches of the plan's layers.
    lost_share
        Fraction of the transfer time that was lost to slower steps. It is negative if these steps happened to be faster
        than the steps before and after the plan.
    lost_steps
        Number of steps during the transfers that were used to measure ``lost_share``.
    decided_from
        Last step before the decision began; ``None`` if unknown. Computing a decision may slow down steps on
        the same host.
    effect
        Effect of the plan; ``None`` until enough steps before and after it are known.
    """

    first_step: float
    end_step: float
    switches: tuple[Switch, ...]
    lost_share: float = 0.0
    lost_steps: int = 0
    decided_from: float | None = None
    effect: SwitchEffect | None = None

    @property
    def asked_step(self) -> float:
        """Step boundary at which the decision began or, if unknown, at which the ranks received the plan."""
        return self.first_step if self.decided_from is None else min(self.decided_from, self.first_step)


@dataclass(frozen=True)
class MovingCosts:
    """Measured costs of moves. A value is ``None`` if there are too few samples.

    Parameters
    ----------
    expert_seconds
        Transfer time of one expert to a rank.
    lost_share
        Fraction of the transfer time that is lost to slower steps.
    commit_seconds
        Commit time of one layer.
    layer_ms
        Time that one layer's experts take per step, in milliseconds. Moves can only save a fraction of it.
    layer_source
        Origin of ``layer_ms``, as shown to operators.
    """

    expert_seconds: float | None = None
    lost_share: float | None = None
    commit_seconds: float | None = None
    layer_ms: float | None = None
    layer_source: str = ""


NOTHING_MEASURED = MovingCosts()


def moving_costs(plans: Sequence[SwitchedPlan]) -> MovingCosts:
    """Estimate the costs of moves from past plans."""
    switches = [switch for plan in plans for switch in plan.switches]
    return MovingCosts(
        _median([switch.expert_seconds for switch in switches], _EXPERT_SECONDS),
        _lost_share(plans),
        _median([switch.commit_seconds for switch in switches], _COMMIT_SECONDS),
    )


def compared(
    plan: SwitchedPlan, plans: Sequence[SwitchedPlan], step_T: Float64, us_T: Float64
) -> SwitchedPlan:
    """Measure the step time lost to a plan's transfers, relative to the steps just before and after the plan.

    Parameters
    ----------
    plan
        Plan to measure.
    plans
        All plans, including ``plan``. Their steps are never used as a reference.
    step_T
        float64 ``[T]``, step numbers in ascending order.
    us_T
        float64 ``[T]``, time of each step in microseconds; NaN if unknown.

    Returns
    -------
    SwitchedPlan
        The plan with a new ``lost_share``. It is unchanged if fewer of its steps are available than for the previous
        measurement, or if there are too few reference steps.
    """
    served_T = served_steps(us_T)
    moving_T = np.zeros(len(step_T), dtype=bool)
    for switch in plan.switches:
        moving_T |= served_T & _in_transfer(switch, step_T, us_T)
    calm_T = served_T & (step_T >= plan.first_step - _NEAR) & (step_T < plan.end_step + _NEAR)
    for switched in plans:
        calm_T &= (step_T < switched.first_step) | (step_T >= switched.end_step)
    steps = int(moving_T.sum())
    if steps < max(plan.lost_steps, 1) or calm_T.sum() < _MIN_CALM_STEPS:
        return plan
    return replace(
        plan, lost_share=1.0 - float(us_T[calm_T].mean() / us_T[moving_T].mean()), lost_steps=steps
    )


def _in_transfer(switch: Switch, step_T: Float64, us_T: Float64) -> npt.NDArray[np.bool_]:
    """Return a mask of the steps during a layer's transfer, bool ``[T]``.

    These are the last steps before ``by_step`` that together take as long as the transfer.
    """
    between_T = (step_T > switch.after_step) & (step_T < switch.by_step)
    us_between_T = np.where(between_T, np.nan_to_num(us_T), 0.0)
    later_T = us_between_T[::-1].cumsum()[::-1] - us_between_T
    transfer_T: npt.NDArray[np.bool_] = between_T & (later_T < switch.transfer_seconds * 1e6)
    return transfer_T


def served_steps(us_T: Float64) -> npt.NDArray[np.bool_]:
    """Return a mask of the steps that have a known time and did not wait for requests, bool ``[T]``.

    A step counts as waiting if it takes more than eight times the median.

    Examples
    --------
    >>> served_steps(np.array([1000.0, np.nan, 1100, 90_000]))
    array([ True, False,  True, False])
    """
    measured_T = np.isfinite(us_T)
    if not measured_T.any():
        return measured_T
    served_T: npt.NDArray[np.bool_] = measured_T & (
        np.nan_to_num(us_T, nan=np.inf) <= _PAUSE * np.median(us_T[measured_T])
    )
    return served_T


def _median(values: Sequence[float], bounds: tuple[float, float]) -> float | None:
    """Return the median of the finite values, clipped to ``bounds``; ``None`` if there are too few."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.clip(np.median(finite), *bounds)) if len(finite) >= MIN_SAMPLES else None


def _lost_share(plans: Sequence[SwitchedPlan]) -> float | None:
    """Return the mean lost fraction over plans, weighted by steps; ``None`` if its confidence interval is too wide."""
    measured = [(plan.lost_share, plan.lost_steps) for plan in plans if plan.lost_steps]
    if len(measured) < MIN_SAMPLES:
        return None
    share_P, steps_P = np.array(measured).T
    weight_P = steps_P / steps_P.sum()
    mean = float(weight_P @ share_P)
    error = math.sqrt(float((weight_P**2) @ (share_P - mean) ** 2) * len(measured) / (len(measured) - 1))
    if student_t_975(len(measured) - 1) * error > MAX_RELATIVE_ERROR:
        return None
    return min(max(mean, 0.0), MAX_LOST)


def student_t_975(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, accurate to 0.2 % for 3 or more degrees of freedom.

    References
    ----------
    Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.7.5.
    """
    z = 1.959963984540054
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
