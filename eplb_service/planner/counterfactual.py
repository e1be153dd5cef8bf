"""Worth of balancing: a window's steps left alone, as served, and under the best known placement, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve
from eplb_service.cost.fit import CurveFitError, OnlineFit, fit_online
from eplb_service.cost.moving import MovingCosts
from eplb_service.figures import digits
from eplb_service.heat.sources import StepTimes
from eplb_service.heat.window import Window
from eplb_service.placement import Float64, mean_par
from eplb_service.planner.plan import Serving
from eplb_service.planner.score import gain_of, split_shares, split_steps, split_us
from eplb_service.planner.settings import STEP, PlannerSettings
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
    if (curve := settings.cost_curve) is not None:
        kind = STATED if curve.fit is None else MEASURED
        return _TimePrice(curve, kind, f"{curve} ({curve.source}); {curve.fit or 'no fit is known'}")
    try:
        found = _fitted(settings, window, serving, times)
    except CurveFitError as why:
        return _linear(settings, window, serving, times, str(why))
    curve = found.curve
    return _TimePrice(curve, FITTED, f"{curve} ({curve.source}); {curve.fit}", found.least, found.most)


def _linear(
    settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes, why: str
) -> _TimePrice:
    """Time follows the hottest rank's tokens, so that a layer takes so long in the mean as it serves."""
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
    return _TimePrice(
        CostCurve(0.0, 0.0, 0.0, slope_us, source=kind),
        kind,
        f"{digits(layer_ms)} ms per layer and step as it serves ({kind}: {said}), by the hottest rank's tokens; "
        f"no cost curve is given, and none is fitted to step times: {why}",
    )


def _fitted(settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes) -> OnlineFit:
    """A curve that the steps' own times speak for; raises ``CurveFitError`` where there is none."""
    if settings.split == STEP:
        # Slots' tokens could be reckoned; but the slowest rank's are the mean rank's, and two terms are one.
        raise CurveFitError(
            "with split step ranks have even tokens in every step; eplb calibrate measures it"
        )
    served_T = np.flatnonzero(times.served_T)[-_MOST_STEPS:]
    return fit_online(times.us_T[served_T], _slot_tokens(window, serving, settings.split, served_T))


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
    others: Sequence[Serving],
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
    others
        What else is known: as decided, and as solved from scratch for this very window.
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
    price = _time_price(settings, window, serving, times)
    ways = serving, found, *others
    us = [
        split_us(
            window.heat_TLE, way.placement, way.log2phy_RLE, window.source_RLE, settings.split, price.curve
        )
        for way in ways
    ]
    left_T1, serving_T1, best_T1 = (_ms_of_steps(us_TL) for us_TL in (us[1], us[0], _fastest(us)))
    gain = gain_of(left_T1, serving_T1)
    if not gain.known:
        return None
    step_ms = None if times.mean_us is None else times.mean_us / 1e3
    share = None if step_ms is None else gain.mean / (step_ms + gain.mean)
    known = step_ms is not None and times.tokens_per_step is not None
    rate = times.tokens_per_step / step_ms * 1e3 if known else None  # type: ignore[operator]
    # What is not known of the price scales both ends of the interval.
    ends = [end * scale for end in (gain.low, gain.high) for scale in (price.least, price.most)]
    worth = Worth(
        steps=window.steps,
        left_alone_ms=float(mean_par(left_T1)),
        serving_ms=float(mean_par(serving_T1)),
        best_ms=float(mean_par(best_T1)),
        best=_BEST_KNOWN,
        gain_ms=gain.mean,
        gain_low_ms=min(ends),
        gain_high_ms=max(ends),
        price_kind=price.kind,
        price=price.reason,
        timed_steps=int(times.served_T.sum()),
        step_ms=step_ms,
        gain_percent=None if share is None else 100 * share,
        tokens_per_second=rate,
        tokens_per_second_won=None if rate is None or share is None else rate * share,
    )
    return worth, price.curve if price.kind == FITTED else None


def _fastest(ways: Sequence[Float64]) -> Float64:
    """Times of the way that is, for each layer, the fastest in the mean, the first of equals, float64 ``[T, L]``."""
    mean_WL = np.nan_to_num([mean_par(us_TL, axis=0) for us_TL in ways], nan=np.inf)
    best_TL: Float64 = np.take_along_axis(np.stack(ways), mean_WL.argmin(axis=0)[None, None], axis=0)[0]
    return best_TL


def _ms_of_steps(us_TL: Float64) -> Float64:
    """All layers together, float64 ``[T, 1]``; NaN for a step without tokens."""
    busy_T = ~np.isnan(us_TL).all(axis=1)
    ms_T = np.where(busy_T, np.nan_to_num(us_TL, nan=0.0).sum(axis=1) / 1e3, np.nan)
    return ms_T[:, None]
