"""Cost of moving weights while a model serves, estimated from what its ranks measured of their switches.

While a layer's weights travel, steps take longer, and its commit stops the model for a moment. So a switch loses the
time of the transfer, times the part of it by which steps were slowed, and the time of the commit. Each of the three is
taken from measurements as soon as there are enough, each by itself. Of ranks and switches medians count, which no
single report moves, and every estimate is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64

MIN_SAMPLES = 4
"""Layers' switches, and plans, below which nothing counts as measured."""
MAX_RELATIVE_ERROR = 0.1
"""Half of the widest 95 % interval with which the part that steps are slowed by counts as measured."""
MAX_LOST = 0.9
"""Part that steps may seem to lose while weights travel; more is taken for something else."""
_EXPERT_SECONDS = (1e-6, 60.0)
"""Bounds of what an expert may seem to take: what lies beyond is a clock's fault."""
_COMMIT_SECONDS = (0.0, 10.0)
"""Bounds of what a commit may seem to take."""
_PAUSE = 8.0
"""Medians from which on a step's time is taken for a wait for requests."""
_NEAR = 64
"""Steps on either side of a plan's that its own are compared with, at most."""
_MIN_CALM_STEPS = 8
"""Steps beside a plan's below which its own are compared with none."""


@dataclass(frozen=True)
class Switch:
    """One layer's switch, medians over its ranks; NaN where none reported it.

    Parameters
    ----------
    expert_seconds
        Seconds for each expert that a rank received, of the ranks that received any.
    transfer_seconds
        Seconds from the first byte to the last on the same ranks, for all layers that were transferred together.
    commit_seconds
        The layer's share of the time for which the commit paused the model.
    after_step, by_step
        Step boundaries between which the weights travelled.
    """

    expert_seconds: float
    transfer_seconds: float
    commit_seconds: float
    after_step: float
    by_step: float


@dataclass(frozen=True)
class SwitchEffect:
    """Change that one plan made to the steps: microseconds and tokens of the slowest ranks that a step has fewer.

    ``steps`` is the number of steps compared on the side that has fewer.
    """

    us_saved: float
    tokens_saved: float
    steps: int


@dataclass(frozen=True)
class SwitchedPlan:
    """A plan's switches, from the step boundary at which ranks took it to the one after which it was done.

    Parameters
    ----------
    first_step, end_step
        Those boundaries.
    switches
        Of its layers.
    lost_share, lost_steps
        Part of the time while its weights travelled that steps lost, and the steps that this was seen over. It is
        negative if these steps happened to be faster than those before and after the plan.
    decided_from
        Last step before the decision began, if that is known: computing it may slow steps on the same host.
    effect
        Change that it made to the steps, once enough steps are known on both sides.
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
        """Step boundary at which the decision began, or at which the ranks took the plan."""
        return self.first_step if self.decided_from is None else min(self.decided_from, self.first_step)


@dataclass(frozen=True)
class MovingCosts:
    """Measured costs of moves; ``None`` for what has not been measured often enough.

    Parameters
    ----------
    expert_seconds
        For each expert that a rank receives.
    lost_share
        Part of that time that steps lose.
    commit_seconds
        Of a layer's switch.
    layer_ms, layer_source
        Milliseconds that one layer's experts take in a step, which is what moves may win a part of, and its origin.
    """

    expert_seconds: float | None = None
    lost_share: float | None = None
    commit_seconds: float | None = None
    layer_ms: float | None = None
    layer_source: str = ""


NOTHING_MEASURED = MovingCosts()


def moving_costs(plans: Sequence[SwitchedPlan]) -> MovingCosts:
    """Costs that the switches of these plans, and the steps beside them, speak for."""
    switches = [switch for plan in plans for switch in plan.switches]
    return MovingCosts(
        _median([switch.expert_seconds for switch in switches], _EXPERT_SECONDS),
        _lost_share(plans),
        _median([switch.commit_seconds for switch in switches], _COMMIT_SECONDS),
    )


def compared(
    plan: SwitchedPlan, plans: Sequence[SwitchedPlan], step_T: Float64, us_T: Float64
) -> SwitchedPlan:
    """The plan with the part that its steps lost, beside just before and just after it, as far as that is seen.

    Parameters
    ----------
    plan, plans
        The plan, and all whose steps are no measure of anything, itself included.
    step_T, us_T
        float64 ``[T]``, numbers of steps in order, and their wall time in microseconds; NaN where not known.

    Returns
    -------
    SwitchedPlan
        As it was where no more of its steps are seen than were before, or too few beside them.
    """
    served_T = served_steps(us_T)
    moving_T = np.zeros(len(step_T), dtype=bool)
    for switch in plan.switches:
        moving_T |= served_T & _travelled(switch, step_T, us_T)
    calm_T = served_T & (step_T >= plan.first_step - _NEAR) & (step_T < plan.end_step + _NEAR)
    for other in plans:
        calm_T &= (step_T < other.first_step) | (step_T >= other.end_step)
    steps = int(moving_T.sum())
    if steps < max(plan.lost_steps, 1) or calm_T.sum() < _MIN_CALM_STEPS:
        return plan
    return replace(
        plan, lost_share=1.0 - float(us_T[calm_T].mean() / us_T[moving_T].mean()), lost_steps=steps
    )


def _travelled(switch: Switch, step_T: Float64, us_T: Float64) -> npt.NDArray[np.bool_]:
    """Steps in which a layer's weights travelled, bool ``[T]``: the last ones that take as long as the transfer did."""
    between_T = (step_T > switch.after_step) & (step_T < switch.by_step)
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


def _median(values: Sequence[float], bounds: tuple[float, float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.clip(np.median(known), *bounds)) if len(known) >= MIN_SAMPLES else None


def _lost_share(plans: Sequence[SwitchedPlan]) -> float | None:
    """Mean over the plans by their steps; ``None`` where its interval by Student's t is too wide to say."""
    seen = [(plan.lost_share, plan.lost_steps) for plan in plans if plan.lost_steps]
    if len(seen) < MIN_SAMPLES:
        return None
    share_P, steps_P = np.array(seen).T
    weight_P = steps_P / steps_P.sum()
    mean = float(weight_P @ share_P)
    error = math.sqrt(float((weight_P**2) @ (share_P - mean) ** 2) * len(seen) / (len(seen) - 1))
    if student_t_975(len(seen) - 1) * error > MAX_RELATIVE_ERROR:
        return None
    return min(max(mean, 0.0), MAX_LOST)


def student_t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, within 0.2 % from 3 degrees of freedom on.

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
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
