"""What tokens cost in time where milliseconds are reported: the best curve that is known, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve
from eplb_service.cost.fit import CurveFitError, fits
from eplb_service.cost.online import OnlineFit, fit_online
from eplb_service.heat.step_times import StepTimes
from eplb_service.heat.window import Window
from eplb_service.placement import Float64
from eplb_service.planner.outlook import Serving
from eplb_service.planner.scoring import split_shares, split_steps
from eplb_service.planner.settings import STEP, PlannerSettings, is_default

MEASURED, FITTED, STATED, ASSUMED = "measured", "fitted", "stated", "assumed"
PRICES = (MEASURED, FITTED, STATED, ASSUMED)
"""Where a price comes from. ``measured``: the curve that was given fits what it was made from; ``fitted``: to this
deployment's own step times; ``stated``: somebody wrote the number down; ``assumed``: nobody did."""
_MOE_SHARE = 0.5
"""Part of a step that experts are taken for where nothing better is known; what replays assume, too."""
_MOST_STEPS = 128
"""Steps that a curve is fitted to at most."""


@dataclass(frozen=True)
class TimePrice:
    """The time that a rank's tokens take.

    Parameters
    ----------
    curve
        Of one layer.
    kind
        One of ``PRICES``.
    reason
        For operators: what it is, and why it is nothing better.
    least, most
        Parts of the curve's time that the true one may be at least and at most, as far as that is known.
    """

    curve: CostCurve
    kind: str
    reason: str
    least: float = 1.0
    most: float = 1.0


def time_price(settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes) -> TimePrice:
    """The curve given; else one fitted to the steps' own times, if that says anything; else time follows tokens.

    Parameters
    ----------
    settings
        With ``cost_curve``, ``layer_ms`` and ``split``.
    window, serving
        The heat, and what served it.
    times
        How long the window's steps took under it; not known for steps that something else served.
    """
    if settings.cost_curve is not None:
        return _given(settings.cost_curve)
    found = _fitted(settings, window, serving, times)
    if isinstance(found, OnlineFit):
        sure = [of for of in (found.read_us, found.slope_us) if of.above_zero]
        return TimePrice(
            found.curve,
            FITTED,
            f"{found.curve.source}; {found.curve.fit}",
            min(of.low / of.value for of in sure),
            max(of.high / of.value for of in sure),
        )
    return _linear(settings, window, serving, times, found)


def _given(curve: CostCurve) -> TimePrice:
    if curve.fit is None:
        return TimePrice(curve, STATED, f"{curve} ({curve.source}); no fit is known")
    return TimePrice(curve, MEASURED, f"{curve} ({curve.source}); {curve.fit}")


def _linear(
    settings: PlannerSettings, window: Window, serving: Serving, times: StepTimes, why: str
) -> TimePrice:
    """Time follows the hottest rank's tokens, so that a layer takes so long in the mean as it serves."""
    peak_TL = split_steps(
        window.heat_TLE, serving.placement, serving.log2phy_RLE, window.source_RLE, settings.split
    ).peak_TK
    busy = peak_TL[peak_TL > 0]
    layer_ms, kind, said = _layer_ms(settings, window.layers, times)
    slope_us = layer_ms * 1e3 / float(busy.mean()) if busy.size else layer_ms * 1e3
    return TimePrice(
        CostCurve(0.0, 0.0, 0.0, slope_us, source=kind),
        kind,
        f"{layer_ms:.3g} ms per layer and step as it serves ({kind}: {said}), by the hottest rank's tokens; "
        f"no cost curve is given, and none is fitted to step times: {why}",
    )


def _layer_ms(settings: PlannerSettings, layers: int, times: StepTimes) -> tuple[float, str, str]:
    """Milliseconds of a layer, where they come from, and from what."""
    if not is_default(settings, "layer_ms"):
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
    if not fits(quality):
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
