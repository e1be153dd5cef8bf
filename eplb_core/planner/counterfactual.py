"""Gain of balancing: the newest steps left alone and as they were served, in balance and, if measured, in time."""

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
from eplb_core.planner.score import Gain, gain_of, par_by_step, split_shares, split_steps, split_us
from eplb_core.planner.settings import STEP, PlannerSettings
from eplb_core.wire.operator import (
    COSTS,
    HELPS,
    NO_GAIN,
    NOT_MEASURABLE,
    NOT_MEASURED,
    TIME_PRICES,
    Worth,
)

MEASURED, FITTED, STATED, ASSUMED = TIME_PRICES
"""Origin of a price of time. ``measured``: the curve that was given fits what it was made from; ``fitted``: to this
deployment's own step times; ``stated``: somebody wrote the number down; ``assumed``: nobody did."""
_MOE_SHARE = 0.5
"""Part of a step that experts are taken for where nothing better is known; what replays assume, too."""
_MAX_STEPS = 128
"""Steps that a curve is fitted to at most."""
_STATED_ERROR = 0.5
"""Part by which a number that somebody wrote down may be wrong, for the range of an estimate; chosen by hand."""
_ROUNDING_US = 1e-6
"""Microseconds per token below which a measured price is rounding."""


@dataclass(frozen=True)
class TimePrice:
    """Cost of one layer's tokens in time.

    Parameters
    ----------
    curve, kind, reason
        The curve, one of ``TIME_PRICES``, and its origin for people.
    least, most
        The least and the most that the true time may be, as parts of the curve's.
    layer_ms
        Time of one layer's experts as it serves, mean over the layers.
    """

    curve: CostCurve
    kind: str
    reason: str
    least: float = 1.0
    most: float = 1.0
    layer_ms: float = 0.0


def time_price(settings: PlannerSettings, window: Window, serving: Layout, times: StepTimes) -> TimePrice:
    """Return the given curve; else one fitted to the steps' own times; else time that follows tokens."""
    found = _source_of_time(settings, window, serving, times)
    us_TL = _us_of_steps(window, serving, settings, found.curve)
    layer_ms = float(mean_par(_ms_of_steps(us_TL))) / window.layers
    return replace(found, layer_ms=layer_ms)


def _source_of_time(
    settings: PlannerSettings, window: Window, serving: Layout, times: StepTimes
) -> TimePrice:
    if (curve := settings.cost_curve) is not None:
        kind = STATED if curve.fit is None else MEASURED
        error = _STATED_ERROR if curve.fit is None else curve.fit.p90_error
        reason = f"{curve} ({curve.source}); {curve.fit or 'no fit is known'}"
        return TimePrice(curve, kind, reason, 1.0 - error, 1.0 + error)
    try:
        found = _fitted(settings, window, serving, times)
    except CurveFitError as why:
        return _linear(settings, window, serving, times, str(why))
    curve = found.curve
    error = 0.0 if curve.fit is None else curve.fit.p90_error
    least = min(found.least, 1.0 - error)
    most = max(found.most, 1.0 + error)
    return TimePrice(curve, FITTED, f"{curve} ({curve.source}); {curve.fit}", least, most)


def _linear(
    settings: PlannerSettings, window: Window, serving: Layout, times: StepTimes, why: str
) -> TimePrice:
    """Return a price by which time follows the hottest rank's tokens, so that a layer takes its stated time."""
    kind, layer_ms, said = STATED, settings.layer_ms, "layer_ms"
    if settings.is_default("layer_ms"):
        kind = ASSUMED
        if times.mean_us is not None:
            layer_ms = _MOE_SHARE * times.mean_us / 1e3 / window.layers
            said = f"{_MOE_SHARE:.0%} of a measured step"
    peak_TL = split_steps(
        window.heat_TLE, serving.placement, serving.log2phy_RLE, window.source_RLE, settings.split
    ).peak_TK
    busy = peak_TL[peak_TL > 0]
    slope_us = layer_ms * 1e3 / float(busy.mean()) if busy.size else layer_ms * 1e3
    return TimePrice(
        CostCurve(0.0, 0.0, 0.0, slope_us, source=kind),
        kind,
        f"{digits(layer_ms)} ms per layer and step as it serves ({kind}: {said}), by the hottest rank's tokens; "
        f"no cost curve is given, and none is fitted to step times: {why}",
        1.0 - _STATED_ERROR,
        1.0 + _STATED_ERROR,
    )


def _fitted(settings: PlannerSettings, window: Window, serving: Layout, times: StepTimes) -> OnlineFit:
    """A curve that the steps' own times speak for; raises ``CurveFitError`` where there is none."""
    if settings.split == STEP:
        # Slots' tokens could be reckoned; but the slowest rank's are the mean rank's, and two terms are one.
        raise CurveFitError(
            "with split step ranks have even tokens in every step; eplb calibrate measures it"
        )
    served_T = np.flatnonzero(times.served_T)[-_MAX_STEPS:]
    return fit_online(times.us_T[served_T], _slot_tokens(window, serving, settings.split, served_T))


def _slot_tokens(window: Window, serving: Layout, split: str, chosen_C: npt.NDArray[np.intp]) -> Float64:
    """Tokens of each slot in the steps chosen, float64 ``[C, L, R, S]``."""
    placement = serving.placement
    layers, ranks, slots = placement.phy2log_LRS.shape
    share_LP = split_shares(window.heat_TLE, placement, serving.log2phy_RLE, window.source_RLE, split)
    expert_LP = placement.phy2log_LRS.reshape(1, layers, ranks * slots)
    heat_CLE = window.heat_TLE[chosen_C].astype(np.float64)
    tokens_CLP: Float64 = np.take_along_axis(heat_CLE, expert_LP, axis=2) * share_LP
    return tokens_CLP.reshape(len(chosen_C), layers, ranks, slots)


def priced(moving: MovingCosts, price: TimePrice | None) -> MovingCosts:
    """Return costs of moves with the time of one layer's experts as they serve, if ``price`` knows it."""
    if price is None or not price.layer_ms > 0:
        return moving
    source = f"{price.kind}, as the price of time"
    return replace(moving, layer_ms=price.layer_ms, layer_source=source)


@dataclass(frozen=True)
class Served:
    """The newest steps as the ranks served them.

    Parameters
    ----------
    par_TL
        float64 ``[T, L]``, ratio of each step; NaN without tokens.
    slowest_T
        float64 ``[T]``, tokens of each layer's most loaded rank, summed over layers.
    times
        Of the same steps.
    effects
        Changes that earlier switches made to step time.
    """

    par_TL: Float64
    slowest_T: Float64
    times: StepTimes
    effects: Sequence[SwitchEffect] = ()


def worth_of(
    window: Window,
    found: Layout,
    serving: Layout,
    served: Served,
    settings: PlannerSettings,
    price: TimePrice | None = None,
) -> Worth | None:
    """Return the gain of balancing over a window's steps.

    Parameters
    ----------
    window
        The steps.
    found, serving
        Layout that the ranks came with, and the one that they serve now.
    served
        The steps as the ranks served them.
    settings
        How tokens are split.
    price
        Cost of tokens for an estimate, if any is known.

    Returns
    -------
    Worth | None
        Time is said to be gained only if that was measured across switches. ``None`` if no step had tokens.
    """
    left = split_steps(window.heat_TLE, found.placement, found.log2phy_RLE, window.source_RLE, settings.split)
    par_left_alone = _mean_of_layers(par_by_step(left))
    par = _mean_of_layers(served.par_TL)
    if not (par > 0 and par_left_alone > 0):
        return None
    times = served.times
    step_ms = None if times.mean_us is None else times.mean_us / 1e3
    known = step_ms is not None and times.tokens_per_step is not None
    worth = Worth(
        steps=window.steps,
        par_left_alone=par_left_alone,
        par=par,
        verdict=NOT_MEASURED,
        reason=_not_measured(served),
        price_kind=ASSUMED if price is None else price.kind,
        price="" if price is None else price.reason,
        switches=len(served.effects),
        timed_steps=int(times.served_T.sum()),
        step_ms=step_ms,
        tokens_per_second=times.tokens_per_step / step_ms * 1e3 if known else None,  # type: ignore[operator]
    )
    per_token = measured_price(served.effects)
    if per_token is not None and step_ms is not None:
        tokens = gain_of(left.peak_TK.sum(axis=1)[:, None], served.slowest_T[:, None])
        return _with_gain(worth, per_token, tokens, step_ms, found.placement.ranks)
    if price is None or price.kind == ASSUMED or not _has_changed(found, serving):
        return worth
    low_ms, high_ms = _estimate(window, found, serving, settings, price)
    return replace(worth, estimate_low_ms=low_ms, estimate_high_ms=high_ms)


def _has_changed(found: Layout, serving: Layout) -> bool:
    """Return whether something else serves than was found."""
    return not (
        np.array_equal(found.placement.phy2log_LRS, serving.placement.phy2log_LRS)
        and np.array_equal(found.log2phy_RLE, serving.log2phy_RLE)
    )


def _not_measured(served: Served) -> str:
    if served.times.mean_us is None:
        return "the ranks report no step times"
    return (
        f"step times before and after {MIN_SWITCHES} switches are needed, {len(served.effects)} "
        f"{'is' if len(served.effects) == 1 else 'are'} known"
    )


def _with_gain(worth: Worth, price: MeasuredPrice, tokens: Gain, step_ms: float, ranks: int) -> Worth:
    """Add the time that balancing saves on these steps, at the price that switches showed."""
    over = f"over {price.switches} switches"
    if not tokens.known:
        return worth
    ends = [each * end / 1e3 for each in (price.low, price.high) for end in (tokens.low, tokens.high)]
    low_ms, gain_ms, high_ms = min(ends), price.us_per_token * tokens.mean / 1e3, max(ends)
    span = f"{digits(low_ms, sign='+')} to {digits(high_ms, sign='+')} ms per step"
    shown = replace(
        worth,
        price_kind=MEASURED,
        price=f"step times before and after switches, {over}, steps of about as many tokens compared",
    )
    if price.low <= _ROUNDING_US and price.high >= -_ROUNDING_US:
        why = f"step time does not measurably follow balance {over} ({span}, 99 % interval)"
        return replace(shown, verdict=NOT_MEASURABLE, reason=why)
    if low_ms <= 0 <= high_ms:
        return replace(shown, verdict=NO_GAIN, reason=f"what serves saves nothing on these steps ({span})")
    share = gain_ms / (step_ms + gain_ms) if step_ms + gain_ms > 0 else 0.0
    rate = worth.tokens_per_second
    return replace(
        shown,
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
    window: Window, found: Layout, serving: Layout, settings: PlannerSettings, price: TimePrice
) -> tuple[float, float]:
    """Return the least and the most milliseconds per step by a price that is stated or fitted."""
    left_T1, serving_T1 = (
        _ms_of_steps(_us_of_steps(window, way, settings, price.curve)) for way in (found, serving)
    )
    gain = gain_of(left_T1, serving_T1)
    ends = [end * scale for end in (gain.low, gain.high) for scale in (price.least, price.most)]
    return min(ends), max(ends)


def _mean_of_layers(par_TL: Float64) -> float:
    """Return the mean over steps, then over layers, of those with tokens; NaN without any."""
    return float(mean_par(mean_par(par_TL, axis=0)))


def _us_of_steps(window: Window, way: Layout, settings: PlannerSettings, curve: CostCurve) -> Float64:
    tables, source = way.log2phy_RLE, window.source_RLE
    return split_us(window.heat_TLE, way.placement, tables, source, settings.split, curve)


def _ms_of_steps(us_TL: Float64) -> Float64:
    """Return all layers together, float64 ``[T, 1]``; NaN for a step without tokens."""
    busy_T = ~np.isnan(us_TL).all(axis=1)
    ms_T = np.where(busy_T, np.nan_to_num(us_TL, nan=0.0).sum(axis=1) / 1e3, np.nan)
    return ms_T[:, None]
