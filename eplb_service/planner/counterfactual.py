"""Worth of balancing: a window's steps left alone, as served, and under the best known placement, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve
from eplb_service.cost.fit import CurveFitError, OnlineFit, fit_online
from eplb_service.cost.moving import MovingCosts
from eplb_service.heat.sources import StepTimes
from eplb_service.heat.window import Window
from eplb_service.placement import Float64, apply_layers, mean_par
from eplb_service.planner.plan import Plan, Serving
from eplb_service.planner.price import SplitCost
from eplb_service.planner.score import gain_of, split_shares, split_steps, split_us
from eplb_service.planner.settings import EVEN, STEP, PlannerSettings
from eplb_service.wire.operator import TIME_PRICES, Worth

MEASURED, FITTED, STATED, ASSUMED = TIME_PRICES
"""Origin of a price of time. ``measured``: the curve that was given fits what it was made from; ``fitted``: to this
deployment's own step times; ``stated``: somebody wrote the number down; ``assumed``: nobody did."""
_MOE_SHARE = 0.5
"""Part of a step that experts are taken for where nothing better is known; what replays assume, too."""
_BEST_KNOWN = (
    "of each layer the fastest, on these very steps, of what serves, what was met, what was decided and what was "
    "solved from scratch for them"
)
"""The placement taken for the best: a bound by hindsight, which no placement for later steps need reach."""
_MOST_STEPS = 128
"""Steps that a curve is fitted to at most."""


@dataclass(frozen=True)
class _TimePrice:
    """Time of one layer's tokens, its origin, and the least and most that the true one may be as parts of it."""

    curve: CostCurve
    kind: str
    reason: str
    least: float = 1.0
    most: float = 1.0


def _time_price(settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes) -> _TimePrice:
    """The curve given; else one fitted to the steps' own times, if that says anything; else time follows tokens."""
    if settings.cost_curve is not None:
        return _given(settings.cost_curve)
    found = _fitted(settings, window, serving, times)
    if isinstance(found, OnlineFit):
        sure = [number for number in (found.read_us, found.slope_us) if number.above_zero]
        return _TimePrice(
            found.curve,
            FITTED,
            f"{found.curve.source}; {found.curve.fit}",
            min(number.low / number.value for number in sure),
            max(number.high / number.value for number in sure),
        )
    return _linear(settings, window, serving, times, found)


def _given(curve: CostCurve) -> _TimePrice:
    if curve.fit is None:
        return _TimePrice(curve, STATED, f"{curve} ({curve.source}); no fit is known")
    return _TimePrice(curve, MEASURED, f"{curve} ({curve.source}); {curve.fit}")


def _linear(
    settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes, why: str
) -> _TimePrice:
    """Time follows the hottest rank's tokens, so that a layer takes so long in the mean as it serves."""
    peak_TL = split_steps(
        window.heat_TLE, serving.placement, serving.log2phy_RLE, window.source_RLE, settings.split
    ).peak_TK
    busy = peak_TL[peak_TL > 0]
    layer_ms, kind, said = _layer_ms(settings, window.layers, times)
    slope_us = layer_ms * 1e3 / float(busy.mean()) if busy.size else layer_ms * 1e3
    return _TimePrice(
        CostCurve(0.0, 0.0, 0.0, slope_us, source=kind),
        kind,
        f"{layer_ms:.3g} ms per layer and step as it serves ({kind}: {said}), by the hottest rank's tokens; "
        f"no cost curve is given, and none is fitted to step times: {why}",
    )


def _layer_ms(settings: PlannerSettings, layers: int, times: StepTimes) -> tuple[float, str, str]:
    """Milliseconds of a layer, where they come from, and from what."""
    if not settings.is_default("layer_ms"):
        return settings.layer_ms, STATED, "layer_ms"
    if times.mean_us is None:
        return settings.layer_ms, ASSUMED, "layer_ms"
    step_ms = times.mean_us / 1e3
    said = f"{_MOE_SHARE:.0%} of a measured step of {step_ms:.4g} ms, over {layers} layers"
    return _MOE_SHARE * step_ms / layers, ASSUMED, said


def _fitted(settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes) -> OnlineFit | str:
    """A curve that the steps' own times speak for, or why there is none."""
    if settings.split == STEP:
        # Slots' tokens could be reckoned; but the slowest rank's are the mean rank's, and two terms are one.
        return (
            "with split step ranks have even tokens in every step, so their times do not show what uneven ones cost; "
            "eplb calibrate measures it"
        )
    served_T = np.flatnonzero(times.served_T)[-_MOST_STEPS:]
    if not served_T.size:
        return "no step time is known of what serves now"
    try:
        found = fit_online(times.us_T[served_T], _slot_tokens(window, serving, settings.split, served_T))
    except CurveFitError as error:
        return str(error)
    quality = found.curve.fit
    assert quality is not None
    if not found.known:
        return (
            f"the times of {served_T.size} steps do not depend measurably on where tokens are (read "
            f"{found.read_us} us, slope {found.slope_us} us per token)"
        )
    if not quality.fits:
        return f"what was fitted misses the steps held out ({quality})"
    return found


def _slot_tokens(window: Window, serving: Serving, split: str, chosen_C: npt.NDArray[np.intp]) -> Float64:
    """Tokens of each slot in the steps chosen, float64 ``[C, L, R, S]``."""
    placement = serving.placement
    layers, ranks, slots = placement.phy2log_LRS.shape
    share_LP = split_shares(window.heat_TLE, placement, serving.log2phy_RLE, window.source_RLE, split)
    expert_LP = placement.phy2log_LRS.reshape(1, layers, ranks * slots)
    heat_CLE = window.heat_TLE[chosen_C].astype(np.float64)
    tokens_CLP: Float64 = np.take_along_axis(heat_CLE, expert_LP, axis=2) * share_LP
    return tokens_CLP.reshape(len(chosen_C), layers, ranks, slots)


def priced(moving: MovingCosts, worth: Worth | None, layers: int) -> MovingCosts:
    """Costs of moves with the time of one of so many layers' experts as they serve, where ``worth`` knows it."""
    if worth is None or worth.serving_ms <= 0:
        return moving
    source = f"{worth.price_kind}, as the price of time"
    return replace(moving, layer_ms=worth.serving_ms / layers, layer_source=source)


def counterfactual(
    window: Window,
    found: Serving,
    serving: Serving,
    decided: Plan,
    settings: PlannerSettings,
    times: StepTimes,
) -> tuple[Worth, CostCurve | None] | None:
    """Judge a window's steps under three placements: as met, as served, and the best known.

    Parameters
    ----------
    window
        The steps.
    found, serving
        What was met when the ranks first came together, and what serves now.
    decided
        What a decision on this window changes, and what it knows by hindsight.
    settings
        How time is priced and tokens are split.
    times
        How long the steps took.

    Returns
    -------
    tuple[Worth, CostCurve | None] | None
        Times and gain, and the curve that was fitted to the steps' own times, where it was; ``None`` where fewer than
        two steps have tokens.
    """
    price, split = _time_price(settings, window, serving, times), settings.split
    serving_TL = _step_us(window, serving, split, price)
    if np.isnan(serving_TL).all():
        return None
    hindsight = Serving(*apply_layers(serving.placement, serving.log2phy_RLE, decided.hindsight))
    ways = serving, found, serving.changed_by(decided), hindsight
    us = [serving_TL, *(_step_us(window, way, split, price) for way in ways[1:])]
    left_T1, serving_T1, best_T1 = (_ms_of_steps(us_TL) for us_TL in (us[1], serving_TL, _fastest(us)))
    gain = gain_of(left_T1, serving_T1)
    if not gain.known:
        return None
    reason = price.reason
    choices = float(window.heat_TLE.sum(axis=2).mean())
    cost = SplitCost.of(settings, serving.placement.ranks, window.experts, choices)
    if cost is not None:
        unsplit_TL = _fastest([_step_us(window, way, EVEN, price) for way in ways])
        reason = f"{reason}; {_of_split(cost, serving_TL, unsplit_TL)}"
    step_ms = None if times.mean_us is None else times.mean_us / 1e3
    share = None if step_ms is None else gain.mean / (step_ms + gain.mean)
    known = step_ms is not None and times.tokens_per_step is not None
    rate = times.tokens_per_step / step_ms * 1e3 if known else None  # type: ignore[operator]
    # What is not known of the price scales both ends of the interval.
    ends = [(gain.low * scale, gain.high * scale) for scale in (price.least, price.most)]
    worth = Worth(
        steps=window.steps,
        left_alone_ms=float(mean_par(left_T1)),
        serving_ms=float(mean_par(serving_T1)),
        best_ms=float(mean_par(best_T1)),
        best=_BEST_KNOWN,
        gain_ms=gain.mean,
        gain_low_ms=min(low for low, _ in ends),
        gain_high_ms=max(high for _, high in ends),
        price_kind=price.kind,
        price=reason,
        timed_steps=int(times.served_T.sum()),
        step_ms=step_ms,
        gain_percent=None if share is None else 100 * share,
        tokens_per_second=rate,
        tokens_per_second_won=None if rate is None or share is None else rate * share,
    )
    return worth, price.curve if price.kind == FITTED else None


def _step_us(window: Window, way: Serving, split: str, price: _TimePrice) -> Float64:
    """Microseconds of each layer's slowest rank in each step, float64 ``[T, L]``; NaN where a layer has no tokens."""
    placement, tables_RLE = way.placement, way.log2phy_RLE
    if not price.curve.linear:
        return split_us(window.heat_TLE, placement, tables_RLE, window.source_RLE, split, price.curve)
    # Where time follows tokens, the hottest rank is the slowest one.
    peak_TL = split_steps(window.heat_TLE, placement, tables_RLE, window.source_RLE, split).peak_TK
    us_TL = price.curve.floor_us + price.curve.slope_us * peak_TL
    return np.where(peak_TL > 0, us_TL, np.nan)


def _fastest(ways: Sequence[Float64]) -> Float64:
    """Times of the way that is, for each layer, the fastest in the mean, the first of equals, float64 ``[T, L]``."""
    best_TL = ways[0]
    for other_TL in ways[1:]:
        faster_L = mean_par(other_TL, axis=0) < mean_par(best_TL, axis=0)
        best_TL = np.where(faster_L, other_TL, best_TL)
    return best_TL


def _of_split(cost: SplitCost, serving_TL: Float64, unsplit_TL: Float64) -> str:
    """Cost and gain of the stepwise split, over the same placements under even shares and without it."""
    split_ms = cost.ms_of_step(serving_TL.shape[1])
    with_it, without = (float(mean_par(_ms_of_steps(us_TL))) for us_TL in (serving_TL, unsplit_TL))
    return (
        f"the stepwise split itself takes {split_ms:.3g} ms of a step more, {cost}: net of it and of the replicas "
        f"that it wakes {without - with_it - split_ms:+.3f} ms per step over the best of these placements under even "
        "shares, without it"
    )


def _ms_of_steps(us_TL: Float64) -> Float64:
    """All layers together, float64 ``[T, 1]``; NaN for a step without tokens."""
    busy_T = ~np.isnan(us_TL).all(axis=1)
    ms_T = np.where(busy_T, np.nan_to_num(us_TL, nan=0.0).sum(axis=1) / 1e3, np.nan)
    return ms_T[:, None]
