"""Measured gain in time: compare step times before and after switches, and estimate a confidence interval."""

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
"""Minimum number of switches, with step times before and after each, for measuring a gain."""
NEAR_STEPS = 64
"""Maximum number of steps compared on either side of a switch."""
_MIN_STEPS = 8
"""Minimum number of matched steps on either side of a switch for estimating its effect."""
_BIN_WIDTH = math.log(1.1)
"""Width of a step-size bin, in the logarithm of the number of tokens. Step sizes in the same bin differ by at most
about 10 %."""
_T_995 = (
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355,
    3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921,
)  # fmt: skip
"""0.995 quantile of Student's t distribution, for 1 to 16 degrees of freedom. It gives a 99 % interval. The level is
high because operators check the figures often."""


def effect_of(plan: SwitchedPlan, plans: Sequence[SwitchedPlan], served: ServedSteps) -> SwitchEffect | None:
    """Return the effect of a plan on step time and on the tokens of the slowest ranks.

    Steps before the decision are compared with steps after the last layer switched. Only steps with about the same
    number of tokens are compared. The fit also includes a linear trend over the step numbers and one over the tokens,
    so neither a trend nor the step size is mistaken for an effect of balancing.

    Parameters
    ----------
    plan
        The plan to evaluate.
    plans
        All recent plans, including this one. Steps during other plans are not compared.
    served
        Steps with their times and tokens.

    Returns
    -------
    SwitchEffect | None
        ``None`` if there are too few comparable steps before or after the plan.
    """
    step_T = served.step_T
    begin, end = _compared_range(plan, plans)
    usable_T = served_steps(served.us_T) & (served.tokens_T > 0) & np.isfinite(served.slowest_T)
    before_T = usable_T & (step_T >= begin) & (step_T < plan.asked_step)
    after_T = usable_T & (step_T >= plan.end_step) & (step_T < end)
    before_T, after_T = _matched(served.tokens_T, before_T, after_T)
    fewest = min(int(before_T.sum()), int(after_T.sum()))
    if fewest < _MIN_STEPS:
        return None
    compared_T = before_T | after_T
    columns = [np.ones(int(compared_T.sum())), after_T[compared_T].astype(np.float64)]
    trends = (step_T[compared_T], served.tokens_T[compared_T])
    columns += [(trend_T - trend_T.mean()) / np.ptp(trend_T) for trend_T in trends if np.ptp(trend_T) > 0]
    measured = np.column_stack([served.us_T, served.slowest_T])[compared_T]
    (_, change_2, *_), *_ = np.linalg.lstsq(np.column_stack(columns), measured, rcond=None)
    return SwitchEffect(us_saved=-float(change_2[0]), tokens_saved=-float(change_2[1]), steps=fewest)


def _compared_range(plan: SwitchedPlan, plans: Sequence[SwitchedPlan]) -> tuple[float, float]:
    """Return the range of steps near a plan that can be compared, from the first step to the end (exclusive).

    The range does not overlap any other plan.
    """
    begin = plan.asked_step - NEAR_STEPS
    end = plan.end_step + NEAR_STEPS
    for neighbour in plans:
        if neighbour is plan:
            continue
        if neighbour.end_step <= plan.first_step:
            begin = max(begin, neighbour.end_step)
        if neighbour.first_step >= plan.end_step:
            end = min(end, neighbour.asked_step)
    return begin, end


def _matched(
    tokens_T: Float64, before_T: npt.NDArray[np.bool_], after_T: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return masks of the steps before and after a plan, restricted to step sizes that occur on both sides."""
    bin_T = np.floor(np.log(np.maximum(tokens_T, 1.0)) / _BIN_WIDTH)
    common = np.intersect1d(bin_T[before_T], bin_T[after_T])
    matched_T = np.isin(bin_T, common)
    return before_T & matched_T, after_T & matched_T


@dataclass(frozen=True)
class MeasuredPrice:
    """Step time per token on the slowest ranks, measured across several switches.

    Parameters
    ----------
    us_per_token
        Microseconds of step time per token on the slowest ranks.
    low
        Lower end of the 99 % interval of ``us_per_token``.
    high
        Upper end of the 99 % interval of ``us_per_token``.
    switches
        Number of switches used for the measurement.
    """

    us_per_token: float
    low: float
    high: float
    switches: int


def measured_price(effects: Sequence[SwitchEffect]) -> MeasuredPrice | None:
    """Return the step time saved for each token removed from the slowest ranks, over all switches.

    The price is the total time saved by all switches, divided by the total number of tokens saved, so that no single
    large switch dominates. The interval reflects the differences between the switches. Each residual is divided by one
    minus the switch's weight (as in HC3). The number of degrees of freedom is the effective number of switches minus
    one.

    Returns
    -------
    MeasuredPrice | None
        ``None`` if fewer than ``MIN_SWITCHES`` switches changed the tokens of the slowest ranks.

    References
    ----------
    J. G. MacKinnon and H. White, *Some Heteroskedasticity-Consistent Covariance Matrix Estimators with Improved Finite
    Sample Properties*, 1985 (HC3).

    Examples
    --------
    Four switches that save about 10 us per token:

    >>> effects = [SwitchEffect(us, tokens, 64) for us, tokens in ((900, 90), (510, 50), (705, 70), (1180, 120))]
    >>> price = measured_price(effects)
    >>> round(price.us_per_token, 2), round(price.low, 2), round(price.high, 2)
    (9.98, 9.02, 10.95)
    """
    changed = [effect for effect in effects if effect.tokens_saved != 0]
    if len(changed) < MIN_SWITCHES:
        return None
    tokens_E = np.array([effect.tokens_saved for effect in changed])
    us_E = np.array([effect.us_saved for effect in changed])
    total = float(np.abs(tokens_E).sum())
    weight_E = np.abs(tokens_E) / total
    price = float(np.sign(tokens_E) @ us_E) / total
    residual_E = (us_E - price * tokens_E) / np.maximum(1.0 - weight_E, 1e-9)
    error = math.sqrt(float(residual_E @ residual_E)) / total
    freedom = math.floor(1.0 / float(weight_E @ weight_E)) - 1
    reach = _T_995[min(max(freedom, 1), len(_T_995)) - 1] * error
    return MeasuredPrice(price, price - reach, price + reach, len(changed))
