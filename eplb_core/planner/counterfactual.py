"""Gain from balancing: compare recent steps as served with the same steps under the initial layout.

The gain is expressed in PAR and, once it has been measured across switches, in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve
from eplb_core.cost.fit import CurveFitError, OnlineFit, fit_online
from eplb_core.cost.moving import MovingCosts, SwitchEffect
from eplb_core.figures import digits
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import Window
from eplb_core.placement import Float64, mean_par
from eplb_core.planner.measured_gain import MIN_SWITCHES, MeasuredPrice, measured_price
from eplb_core.planner.plan import Layout
from eplb_core.planner.score import Gain, gain_of, par_by_step, slowest_rank_us, split_steps
from eplb_core.planner.settings import STEP, PlannerSettings
from eplb_core.planner.token_split import split_shares
from eplb_core.planner.verdicts import COSTS, HELPS, NO_GAIN, NOT_MEASURABLE, NOT_MEASURED, TIME_PRICES, Worth

MEASURED, FITTED, STATED, ASSUMED = TIME_PRICES
"""Origin of a time price. ``measured``: the configured curve includes its fit quality; ``fitted``: a curve was fitted
to this deployment's step times; ``stated``: the settings contain the curve or the time; ``assumed``: neither the
settings nor the step times provide a value."""
_MOE_SHARE = 0.5
"""Assumed fraction of the step time spent in the experts. Replays use the same assumption."""
_MAX_FIT_STEPS = 128
"""Maximum number of steps that a curve is fitted to."""
_STATED_ERROR = 0.5
"""Assumed relative error of a stated value, used for the range of an estimate. Chosen by hand."""
_ROUNDING_US = 1e-6
"""Measured prices below this value, in microseconds per token, are treated as rounding errors."""


@dataclass(frozen=True)
class TimePrice:
    """Time that one layer needs to process its tokens.

    Parameters
    ----------
    curve
        Time as a function of the tokens.
    kind
        Origin of the curve, one of ``TIME_PRICES``.
    reason
        Origin of the curve, described in one sentence for operators.
    least
        Lower bound on the ratio of the true time to the curve's time.
    most
        Upper bound on the ratio of the true time to the curve's time.
    layer_ms
        Milliseconds per step spent in one layer's experts under the current layout, averaged over the layers.
    """

    curve: CostCurve
    kind: str
    reason: str
    least: float = 1.0
    most: float = 1.0
    layer_ms: float = 0.0


def time_price(settings: PlannerSettings, window: Window, current: Layout, times: StepTimes) -> TimePrice:
    """Return the best available estimate of the time price.

    Use the configured cost curve if there is one, or else a curve fitted to the step times. If neither is available,
    the time is assumed to be proportional to the hottest rank's tokens.
    """
    price = _best_price(settings, window, current, times)
    us_TL = _us_of_steps(window, current, settings, price.curve)
    layer_ms = float(mean_par(_ms_of_steps(us_TL))) / window.layers
    return replace(price, layer_ms=layer_ms)


def _best_price(settings: PlannerSettings, window: Window, current: Layout, times: StepTimes) -> TimePrice:
    """Return the time price without setting ``layer_ms``."""
    if settings.cost_curve is not None:
        return _configured(settings.cost_curve)
    try:
        fit = _fit_curve(settings, window, current, times)
    except CurveFitError as refusal:
        return _linear(settings, window, current, times, str(refusal))
    curve = fit.curve
    error = 0.0 if curve.fit is None else curve.fit.p90_error
    reason = f"{curve} ({curve.source}); {curve.fit}"
    return TimePrice(curve, FITTED, reason, min(fit.least, 1.0 - error), max(fit.most, 1.0 + error))


def _configured(curve: CostCurve) -> TimePrice:
    """Return the time price from a configured cost curve, which counts as measured if its fit quality is known."""
    kind = STATED if curve.fit is None else MEASURED
    error = _STATED_ERROR if curve.fit is None else curve.fit.p90_error
    reason = f"{curve} ({curve.source}); {curve.fit or 'fit quality unknown'}"
    return TimePrice(curve, kind, reason, 1.0 - error, 1.0 + error)


def _linear(
    settings: PlannerSettings, window: Window, current: Layout, times: StepTimes, no_fit_reason: str
) -> TimePrice:
    """Return a price proportional to the hottest rank's tokens, scaled to the stated or assumed time per layer."""
    kind = STATED
    layer_ms = settings.layer_ms
    source = "layer_ms"
    if settings.is_default("layer_ms"):
        kind = ASSUMED
        if times.mean_us is not None:
            layer_ms = _MOE_SHARE * times.mean_us / 1e3 / window.layers
            source = f"{_MOE_SHARE:.0%} of a measured step"
    peak_TL = split_steps(
        window.heat_TLE, current.placement, current.log2phy_RLE, window.source_RLE, settings.split
    ).peak_TK
    busy = peak_TL[peak_TL > 0]
    slope_us = layer_ms * 1e3 / float(busy.mean()) if busy.size else layer_ms * 1e3
    return TimePrice(
        CostCurve(0.0, 0.0, 0.0, slope_us, source=kind),
        kind,
        f"{digits(layer_ms)} ms per layer per step in the current layout ({kind}: {source}), proportional to the "
        "hottest rank's tokens; no cost curve is configured, and none could be fitted to the step times: "
        f"{no_fit_reason}",
        1.0 - _STATED_ERROR,
        1.0 + _STATED_ERROR,
    )


def _fit_curve(settings: PlannerSettings, window: Window, current: Layout, times: StepTimes) -> OnlineFit:
    """Fit a curve to the step times. Raises ``CurveFitError`` if they do not determine one."""
    if settings.split == STEP:
        # The tokens per slot could be computed, but the slowest rank receives about as many tokens as the average
        # rank. A fit therefore cannot separate the slowest rank's term from the batch term.
        raise CurveFitError(
            "with split=step, tokens are balanced in every step; measure a curve with eplb calibrate"
        )
    timed_T = np.flatnonzero(times.served_T)[-_MAX_FIT_STEPS:]
    return fit_online(times.us_T[timed_T], _slot_tokens(window, current, settings.split, timed_T))


def _slot_tokens(window: Window, layout: Layout, split: str, step_C: npt.NDArray[np.intp]) -> Float64:
    """Return each slot's expected tokens in the selected steps, float64 ``[C, L, R, S]``."""
    placement = layout.placement
    layers, ranks, slots = placement.phy2log_LRS.shape
    share_LP = split_shares(window.heat_TLE, placement, layout.log2phy_RLE, window.source_RLE, split)
    expert_LP = placement.phy2log_LRS.reshape(1, layers, ranks * slots)
    heat_CLE = window.heat_TLE[step_C].astype(np.float64)
    tokens_CLP: Float64 = np.take_along_axis(heat_CLE, expert_LP, axis=2) * share_LP
    return tokens_CLP.reshape(len(step_C), layers, ranks, slots)


def priced(moving: MovingCosts, price: TimePrice | None) -> MovingCosts:
    """Return the move costs. If ``price`` contains a layer time, it replaces theirs."""
    if price is None or not price.layer_ms > 0:
        return moving
    source = f"from the {price.kind} cost of tokens"
    return replace(moving, layer_ms=price.layer_ms, layer_source=source)


@dataclass(frozen=True)
class Served:
    """Measurements of recent steps as the ranks served them.

    Parameters
    ----------
    par_TL
        float64 ``[T, L]``, PAR of each step; NaN if there are no tokens.
    slowest_T
        float64 ``[T]``, tokens of each layer's most loaded rank, summed over the layers.
    times
        Times of these steps.
    effects
        Measured effects of earlier switches on step time.
    """

    par_TL: Float64
    slowest_T: Float64
    times: StepTimes
    effects: Sequence[SwitchEffect] = ()


def worth_of(
    window: Window,
    initial: Layout,
    current: Layout,
    served: Served,
    settings: PlannerSettings,
    price: TimePrice | None = None,
) -> Worth | None:
    """Return the gain from balancing over a window's steps.

    A gain in time is reported only if it was measured across switches. Otherwise, the result contains an estimate if
    the time price is known and the layout differs from the initial one.

    Parameters
    ----------
    window
        The steps.
    initial
        Initial layout of the deployment.
    current
        Current layout.
    served
        The steps as the ranks served them.
    settings
        Planner settings; ``split`` determines how tokens are split over replicas.
    price
        Time price, used for an estimate; ``None`` if unknown.

    Returns
    -------
    Worth | None
        ``None`` if no step had tokens.
    """
    unbalanced = split_steps(
        window.heat_TLE, initial.placement, initial.log2phy_RLE, window.source_RLE, settings.split
    )
    par_left_alone = _mean_of_layers(par_by_step(unbalanced))
    par = _mean_of_layers(served.par_TL)
    if not (par > 0 and par_left_alone > 0):
        return None
    times = served.times
    step_ms = None if times.mean_us is None else times.mean_us / 1e3
    tokens_per_second = None
    if step_ms is not None and times.tokens_per_step is not None:
        tokens_per_second = times.tokens_per_step / step_ms * 1e3
    worth = Worth(
        steps=window.steps,
        par_left_alone=par_left_alone,
        par=par,
        verdict=NOT_MEASURED,
        reason=_why_not_measured(served),
        price_kind=ASSUMED if price is None else price.kind,
        price="" if price is None else price.reason,
        switches=len(served.effects),
        timed_steps=int(times.served_T.sum()),
        step_ms=step_ms,
        tokens_per_second=tokens_per_second,
    )
    per_token = measured_price(served.effects)
    if per_token is not None and step_ms is not None:
        tokens = gain_of(unbalanced.peak_TK.sum(axis=1)[:, None], served.slowest_T[:, None])
        return _with_gain(worth, per_token, tokens, step_ms, initial.placement.ranks)
    if price is None or price.kind == ASSUMED or not _differ(initial, current):
        return worth
    low_ms, high_ms = _estimate(window, initial, current, settings, price)
    return replace(worth, estimate_low_ms=low_ms, estimate_high_ms=high_ms)


def _differ(initial: Layout, current: Layout) -> bool:
    """Return True if the two layouts have different placements or tables."""
    return not (
        np.array_equal(initial.placement.phy2log_LRS, current.placement.phy2log_LRS)
        and np.array_equal(initial.log2phy_RLE, current.log2phy_RLE)
    )


def _why_not_measured(served: Served) -> str:
    """Return the reason shown to operators until a gain in time has been measured."""
    if served.times.mean_us is None:
        return "the ranks report no step times"
    count = len(served.effects)
    verb = "is" if count == 1 else "are"
    return f"step times before and after {MIN_SWITCHES} switches are needed; {count} {verb} known"


def _with_gain(worth: Worth, price: MeasuredPrice, tokens: Gain, step_ms: float, ranks: int) -> Worth:
    """Return ``worth`` with the time that balancing saves on these steps, given the price measured across switches.

    Parameters
    ----------
    worth
        Gain in PAR, without times.
    price
        Step time per token on the slowest ranks, with its confidence interval.
    tokens
        Reduction of the slowest ranks' tokens per step, relative to the initial layout.
    step_ms
        Mean step time in milliseconds.
    ranks
        R, number of ranks.
    """
    over = f"over {price.switches} switches"
    if not tokens.known:
        return worth
    ends = [us * end / 1e3 for us in (price.low, price.high) for end in (tokens.low, tokens.high)]
    low_ms = min(ends)
    high_ms = max(ends)
    gain_ms = price.us_per_token * tokens.mean / 1e3
    span = f"{digits(low_ms, sign='+')} to {digits(high_ms, sign='+')} ms per step"
    measured = replace(
        worth,
        price_kind=MEASURED,
        price=f"step times before and after switches, {over}, comparing steps with about the same number of tokens",
    )
    if price.low <= _ROUNDING_US and price.high >= -_ROUNDING_US:
        reason = f"step time does not measurably depend on balance {over} ({span}, 99 % interval)"
        return replace(measured, verdict=NOT_MEASURABLE, reason=reason)
    if low_ms <= 0 <= high_ms:
        reason = f"the current layout saves no time on these steps ({span})"
        return replace(measured, verdict=NO_GAIN, reason=reason)
    share = gain_ms / (step_ms + gain_ms) if step_ms + gain_ms > 0 else 0.0
    rate = worth.tokens_per_second
    return replace(
        measured,
        verdict=HELPS if low_ms > 0 else COSTS,
        reason=f"measured {over}",
        gain_ms=gain_ms,
        gain_low_ms=low_ms,
        gain_high_ms=high_ms,
        gain_percent=100 * share,
        ranks_worth=ranks * share,
        tokens_per_second_won=None if rate is None else rate * share,
    )


def _estimate(
    window: Window, initial: Layout, current: Layout, settings: PlannerSettings, price: TimePrice
) -> tuple[float, float]:
    """Return the estimated range of the time saved, in milliseconds per step, at a stated or fitted price."""
    initial_T1 = _ms_of_steps(_us_of_steps(window, initial, settings, price.curve))
    current_T1 = _ms_of_steps(_us_of_steps(window, current, settings, price.curve))
    gain = gain_of(initial_T1, current_T1)
    ends = [end * scale for end in (gain.low, gain.high) for scale in (price.least, price.most)]
    return min(ends), max(ends)


def _mean_of_layers(par_TL: Float64) -> float:
    """Average over each layer's steps with tokens, then over the layers; return NaN if no step has tokens."""
    return float(mean_par(mean_par(par_TL, axis=0)))


def _us_of_steps(window: Window, layout: Layout, settings: PlannerSettings, curve: CostCurve) -> Float64:
    """Return the time of each layer's slowest rank in each step, in microseconds, float64 ``[T, L]``."""
    return slowest_rank_us(
        window.heat_TLE, layout.placement, layout.log2phy_RLE, window.source_RLE, settings.split, curve
    )


def _ms_of_steps(us_TL: Float64) -> Float64:
    """Return the milliseconds per step, summed over the layers, float64 ``[T, 1]``; NaN if there are no tokens."""
    busy_T = ~np.isnan(us_TL).all(axis=1)
    ms_T = np.where(busy_T, np.nan_to_num(us_TL, nan=0.0).sum(axis=1) / 1e3, np.nan)
    return ms_T[:, None]
