"""Gain in time as ranks measured it: step times before and after switches, with an interval across the switches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.cost.moving import SwitchedPlan, SwitchEffect, served_steps
from eplb_core.heat.sources import ServedSteps
from eplb_core.placement import Float64

MIN_SWITCHES = 4
"""Switches with step times on both sides below which nothing counts as measured."""
NEAR_STEPS = 64
"""Steps on either side of a switch that are compared, at most."""
_MIN_STEPS = 8
"""Matched steps on either side of a switch below which it says nothing."""
_ALIKE = math.log(1.1)
"""Steps are compared with steps of the other side that have about a tenth more or fewer tokens, at most."""
_T_995 = (
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355,
    3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921,
)  # fmt: skip
"""Student's t at 0.995, for 1 to 16 degrees of freedom: the figures are looked at again and again."""


def effect_of(plan: SwitchedPlan, plans: Sequence[SwitchedPlan], served: ServedSteps) -> SwitchEffect | None:
    """Return what a plan changed: step time, and tokens of the slowest ranks.

    Steps before the decision began are compared with steps after the last layer switched, as far as they have about as
    many tokens. Both differences are what remains beside a linear trend over the steps and over their tokens. So
    neither a trend nor the size of the steps is mistaken for an effect of balance.

    Parameters
    ----------
    plan, plans
        The plan, and all whose steps are not to be compared, itself included.
    served
        Steps with their times and tokens.

    Returns
    -------
    SwitchEffect | None
        ``None`` if too few comparable steps are known on either side.
    """
    step_T = served.step_T
    others = [other for other in plans if other is not plan]
    begin = max(
        [plan.asked_step - NEAR_STEPS, *(one.end_step for one in others if one.end_step <= plan.first_step)]
    )
    end = min(
        [plan.end_step + NEAR_STEPS, *(one.asked_step for one in others if one.first_step >= plan.end_step)]
    )
    usable_T = served_steps(served.us_T) & (served.tokens_T > 0) & np.isfinite(served.slowest_T)
    before_T = usable_T & (step_T >= begin) & (step_T < plan.asked_step)
    after_T = usable_T & (step_T >= plan.end_step) & (step_T < end)
    before_T, after_T = _matched(served.tokens_T, before_T, after_T)
    fewest = min(int(before_T.sum()), int(after_T.sum()))
    if fewest < _MIN_STEPS:
        return None
    compared_T = before_T | after_T
    columns = [np.ones(int(compared_T.sum())), after_T[compared_T].astype(np.float64)]
    for values_T in (step_T, served.tokens_T):
        chosen = values_T[compared_T]
        if np.ptp(chosen) > 0:
            columns.append((chosen - chosen.mean()) / np.ptp(chosen))
    measured = np.column_stack([served.us_T, served.slowest_T])[compared_T]
    (_, change_2, *_), *_ = np.linalg.lstsq(np.column_stack(columns), measured, rcond=None)
    return SwitchEffect(us_saved=-float(change_2[0]), tokens_saved=-float(change_2[1]), steps=fewest)


def _matched(
    tokens_T: Float64, before_T: npt.NDArray[np.bool_], after_T: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the steps of each side that have a counterpart of about as many tokens on the other."""
    size_T = np.floor(np.log(np.maximum(tokens_T, 1.0)) / _ALIKE)
    both = np.intersect1d(size_T[before_T], size_T[after_T])
    alike_T = np.isin(size_T, both)
    return before_T & alike_T, after_T & alike_T


@dataclass(frozen=True)
class MeasuredPrice:
    """Microseconds of a step for each token of its slowest ranks, as switches show it, with its 99 % interval."""

    us_per_token: float
    low: float
    high: float
    switches: int


def measured_price(effects: Sequence[SwitchEffect]) -> MeasuredPrice | None:
    """Return the time that each token fewer on the slowest ranks saved, over all switches.

    It is the time that all switches saved, divided by the tokens that they saved. So one large switch does not decide
    it. The interval covers how the switches differ: each residual is divided by one less the switch's weight (as in
    HC3), and there are as many degrees of freedom as switches really count, less one.

    Returns
    -------
    MeasuredPrice | None
        ``None`` below ``MIN_SWITCHES`` switches that changed balance at all.

    References
    ----------
    J. G. MacKinnon and H. White, *Some Heteroskedasticity-Consistent Covariance Matrix Estimators with Improved Finite
    Sample Properties*, 1985 (HC3).
    """
    changed = [effect for effect in effects if effect.tokens_saved != 0]
    if len(changed) < MIN_SWITCHES:
        return None
    saved_E = np.array([effect.tokens_saved for effect in changed])
    us_E = np.array([effect.us_saved for effect in changed])
    all_saved = float(np.abs(saved_E).sum())
    weight_E = np.abs(saved_E) / all_saved
    price = float(np.sign(saved_E) @ us_E) / all_saved
    residual_E = (us_E - price * saved_E) / np.maximum(1.0 - weight_E, 1e-9)
    error = math.sqrt(float(residual_E @ residual_E)) / all_saved
    freedom = math.floor(1.0 / float(weight_E @ weight_E)) - 1
    reach = _T_995[min(max(freedom, 1), len(_T_995)) - 1] * error
    return MeasuredPrice(price, price - reach, price + reach, len(changed))
