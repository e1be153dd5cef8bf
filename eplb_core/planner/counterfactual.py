"""Gain of balancing: recent steps as served, compared with the same steps under the initial layout.

The gain is expressed in PAR and, if switches have measured it, in time.
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
from eplb_core.planner.score import Gain, gain_of, par_by_step, split_steps, split_us
from eplb_core.planner.settings import STEP, PlannerSettings
from eplb_core.planner.token_split import split_shares
from eplb_core.planner.verdicts import COSTS, HELPS, NO_GAIN, NOT_MEASURABLE, NOT_MEASURED, TIME_PRICES, Worth

MEASURED, FITTED, STATED, ASSUMED = TIME_PRICES
"""Origin of a time price. ``measured``: the configured curve comes with the quality of its fit; ``fitted``: a curve was
fitted to this deployment's step times; ``stated``: the settings contain the curve or the time; ``assumed``: neither the
settings nor the step times have a figure."""
_MOE_SHARE = 0.5
"""Assumed fraction of a step that the experts take. Replays assume the same."""
_MAX_FIT_STEPS = 128
"""Limit on the steps that a curve is fitted to."""
_STATED_ERROR = 0.5
"""Relative error that is allowed for a stated figure in the range of an estimate; chosen by hand."""
_ROUNDING_US = 1e-6
"""Measured price, in microseconds per token, below which it is considered rounding."""


@dataclass(frozen=True)
class TimePrice:
    """Cost of one layer's tokens in time.

    Parameters
    ----------
    curve
        Cost of tokens.
    kind
        Origin of the curve, one of ``TIME_PRICES``.
    reason
        Origin of the curve in a sentence for operators.
    least
        Smallest factor by which the true time may differ from the curve's.
    most
        Largest factor by which the true time may differ from the curve's.
    layer_ms
        Milliseconds of one layer's experts per step under the current layout, mean over the layers.
    """

    curve: CostCurve
    kind: str
    reason: str
    least: float = 1.0
    most: float = 1.0
    layer_ms: float = 0.0


def time_price(settings: PlannerSettings, window: Window, current: Layout, times: StepTimes) -> TimePrice:
    """Return the best available cost of tokens in time.

    This is the configured cost curve; otherwise a curve fitted to the step times; otherwise a time proportional to the
    hottest rank's tokens.
    """
    price = _best_price(settings, window, current, times)
    us_TL = _us_of_steps(window, current, settings, price.curve)
    layer_ms = float(mean_par(_ms_of_steps(us_TL))) / window.layers
    return replace(price, layer_ms=layer_ms)


def _best_price(settings: PlannerSettings, window: Window, current: Layout, times: StepTimes) -> TimePrice:
    """Return ``time_price`` without the time of a layer."""
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
    """Return the price of a configured cost curve, which is measured if the quality of its fit is known."""
    kind = STATED if curve.fit is None else MEASURED
    error = _STATED_ERROR if curve.fit is None else curve.fit.p90_error
    reason = f"{curve} ({curve.source}); {curve.fit or 'no fit is known'}"
    return TimePrice(curve, kind, reason, 1.0 - error, 1.0 + error)


def _linear(
    settings: PlannerSettings, window: Window, current: Layout, times: StepTimes, no_fit_reason: str
) -> TimePrice:
    """Return a time proportional to the hottest rank's tokens, scaled to the stated or assumed time of a layer."""
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
        f"{digits(layer_ms)} ms per layer and step in the current layout ({kind}: {source}), proportional to the "
        f"hottest rank's tokens; no cost curve is configured, and none was fitted to step times: {no_fit_reason}",
        1.0 - _STATED_ERROR,
        1.0 + _STATED_ERROR,
    )


def _fit_curve(settings: PlannerSettings, window: Window, current: Layout, times: StepTimes) -> OnlineFit:
    """Fit a curve to the step times. Raises ``CurveFitError`` if they do not determine one."""
    if settings.split == STEP:
        # The slots' tokens could be computed, but the slowest rank has about the mean tokens. A fit cannot separate
        # the term of the slowest rank from the term of the batch.
        raise CurveFitError(
            "with split step ranks have even tokens in every step; measure a curve with eplb calibrate"
        )
    timed_T = np.flatnonzero(times.served_T)[-_MAX_FIT_STEPS:]
    return fit_online(times.us_T[timed_T], _slot_tokens(window, current, settings.split, timed_T))


def _slot_tokens(window: Window, layout: Layout, split: str, step_C: npt.NDArray[np.intp]) -> Float64:
    """Return the expected tokens of each slot in the selected steps, float64 ``[C, L, R, S]``."""
    placement = layout.placement
    layers, ranks, slots = placement.phy2log_LRS.shape
    share_LP = split_shares(window.heat_TLE, placement, layout.log2phy_RLE, window.source_RLE, split)
    expert_LP = placement.phy2log_LRS.reshape(1, layers, ranks * slots)
    heat_CLE = window.heat_TLE[step_C].astype(np.float64)
    tokens_CLP: Float64 = np.take_along_axis(heat_CLE, expert_LP, axis=2) * share_LP
    return tokens_CLP.reshape(len(step_C), layers, ranks, slots)


def priced(moving: MovingCosts, price: TimePrice | None) -> MovingCosts:
    """Return the costs of moves, with the time of one layer's experts from ``price`` if it has one."""
    if price is None or not price.layer_ms > 0:
        return moving
    source = f"{price.kind}, as the price of time"
    return replace(moving, layer_ms=price.layer_ms, layer_source=source)


@dataclass(frozen=True)
class Served:
    """Recent steps as the ranks served them.

    Parameters
    ----------
    par_TL
        float64 ``[T, L]``, PAR of each step; NaN without tokens.
    slowest_T
        float64 ``[T]``, tokens of each layer's most loaded rank, summed over layers.
    times
        Times of these steps.
    effects
        Changes that earlier switches made to step time.
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
    """Return the gain of balancing over a window's steps.

    A gain in time is reported only if it was measured across switches. Otherwise the result has an estimate, if the
    price of time is known and the layout has changed.

    Parameters
    ----------
    window
        The steps.
    initial
        Layout that the deployment had at first.
    current
        Layout that the ranks serve now.
    served
        The steps as the ranks served them.
    settings
        Settings with the ``split`` of the tokens.
    price
        Cost of tokens for an estimate; ``None`` if unknown.

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
    """Return the reason that is shown until a gain in time is measured."""
    if served.times.mean_us is None:
        return "the ranks report no step times"
    count = len(served.effects)
    verb = "is" if count == 1 else "are"
    return f"step times before and after {MIN_SWITCHES} switches are needed, {count} {verb} known"


def _with_gain(worth: Worth, price: MeasuredPrice, tokens: Gain, step_ms: float, ranks: int) -> Worth:
    """Add the time that balancing saves on these steps, at the price that switches have measured.

    Parameters
    ----------
    worth
        Gain in PAR, without times.
    price
        Step time per token of the slowest ranks.
    tokens
        Tokens per step that the slowest ranks have fewer than under the initial layout.
    step_ms
        Mean milliseconds of a step.
    ranks
        R.
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
        price=f"step times before and after switches, {over}, comparing steps of about the same number of tokens",
    )
    if price.low <= _ROUNDING_US and price.high >= -_ROUNDING_US:
        reason = f"step time does not measurably follow balance {over} ({span}, 99 % interval)"
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
    """Return the range of the time saved at a stated or fitted price, in milliseconds per step."""
    initial_T1 = _ms_of_steps(_us_of_steps(window, initial, settings, price.curve))
    current_T1 = _ms_of_steps(_us_of_steps(window, current, settings, price.curve))
    gain = gain_of(initial_T1, current_T1)
    ends = [end * scale for end in (gain.low, gain.high) for scale in (price.least, price.most)]
    return min(ends), max(ends)


def _mean_of_layers(par_TL: Float64) -> float:
    """Return the mean over each layer's steps with tokens, then over the layers; NaN if no step has tokens."""
    return float(mean_par(mean_par(par_TL, axis=0)))


def _us_of_steps(window: Window, layout: Layout, settings: PlannerSettings, curve: CostCurve) -> Float64:
    """Return the time of each layer's slowest rank in each step, in microseconds, float64 ``[T, L]``."""
    return split_us(
        window.heat_TLE, layout.placement, layout.log2phy_RLE, window.source_RLE, settings.split, curve
    )


def _ms_of_steps(us_TL: Float64) -> Float64:
    """Return the milliseconds of all layers together, float64 ``[T, 1]``; NaN for a step without tokens."""
    busy_T = ~np.isnan(us_TL).all(axis=1)
    ms_T = np.where(busy_T, np.nan_to_num(us_TL, nan=0.0).sum(axis=1) / 1e3, np.nan)
    return ms_T[:, None]
