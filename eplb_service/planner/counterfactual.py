"""What steps take as they are served, would have taken had nothing been done, and under the best that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.step_times import StepTimes
from eplb_service.heat.window import Window
from eplb_service.placement import Float64, apply_layers, mean_par
from eplb_service.planner.move_price import LayerTime
from eplb_service.planner.outlook import Serving
from eplb_service.planner.plan import Plan
from eplb_service.planner.scoring import split_steps, split_us
from eplb_service.planner.settings import EVEN, PlannerSettings
from eplb_service.planner.split_cost import SplitCost
from eplb_service.planner.time_price import FITTED, TimePrice, time_price
from eplb_service.planner.worth import Gain, gain_of

BEST_KNOWN = (
    "of each layer the fastest, on these very steps, of what serves, what was met, what was decided and what was "
    "solved from scratch for them"
)
"""What is taken for the best placement: a bound by hindsight, which no placement for later steps need reach."""


@dataclass(frozen=True)
class Counterfactual:
    """One window's steps under three placements; the slowest ranks of all layers together, milliseconds per step.

    Parameters
    ----------
    steps
        Steps of the window.
    left_alone_ms
        Under the layout that was met when the ranks first came together.
    serving_ms
        As they are served now.
    best_ms
        Under the best known (``BEST_KNOWN``).
    gain
        What serves over what was met, per step, with a 95 % interval over the steps and the price's.
    price
        What tokens cost.
    step_ms
        Wall time of a step as it is served, mean of ``timed_steps``; ``None`` where no agent reports it.
    tokens_per_step
        Mean tokens of those; ``None`` where hosts do not report them.
    timed_steps
        Steps of known time that are no wait for requests.
    """

    steps: int
    left_alone_ms: float
    serving_ms: float
    best_ms: float
    gain: Gain
    price: TimePrice
    step_ms: float | None = None
    tokens_per_step: float | None = None
    timed_steps: int = 0

    def layer_time(self, layers: int) -> LayerTime | None:
        """How long one of so many layers' experts take as they serve; ``None`` where that comes to nothing."""
        if self.serving_ms <= 0:
            return None
        return LayerTime(self.serving_ms / layers, f"{self.price.kind}, as the price of time")

    @property
    def fitted_curve(self) -> CostCurve | None:
        """What was fitted to the steps' own times; ``None`` where that was refused, or a curve was given."""
        return self.price.curve if self.price.kind == FITTED else None

    @property
    def gain_share(self) -> float | None:
        """The gain as a part of a step as it would be, left alone; ``None`` where step times are not known."""
        return None if self.step_ms is None else self.gain.mean / (self.step_ms + self.gain.mean)

    @property
    def tokens_per_second(self) -> float | None:
        """As it serves; ``None`` where step times or tokens are not known."""
        if self.step_ms is None or self.tokens_per_step is None:
            return None
        return self.tokens_per_step / self.step_ms * 1e3

    @property
    def tokens_per_second_won(self) -> float | None:
        """What the gain is of that; ``None`` as before."""
        rate, share = self.tokens_per_second, self.gain_share
        return None if rate is None or share is None else rate * share


def counterfactual(
    window: Window,
    found: Serving,
    serving: Serving,
    decided: Plan,
    settings: PlannerSettings,
    times: StepTimes,
) -> Counterfactual | None:
    """Judge a window's steps.

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
    Counterfactual | None
        ``None`` where fewer than two steps have tokens.
    """
    price = time_price(settings, window, serving, times)
    serving_TL = step_us(window, serving, settings.split, price)
    if np.isnan(serving_TL).all():
        return None
    found_TL = step_us(window, found, settings.split, price)
    hindsight = Serving(*apply_layers(serving.placement, serving.log2phy_RLE, decided.hindsight))
    others = serving.changed_by(decided), hindsight
    best_TL = _fastest(
        [serving_TL, found_TL, *(step_us(window, way, settings.split, price) for way in others)]
    )
    left_T1, serving_T1, best_T1 = (_ms_of_steps(us_TL) for us_TL in (found_TL, serving_TL, best_TL))
    gain = _widened(gain_of(left_T1, serving_T1), price)
    if not gain.known:
        return None
    choices = float(window.heat_TLE.sum(axis=2).mean())
    cost = SplitCost.of(settings, serving.placement.ranks, window.experts, choices)
    if cost is not None:
        ways = serving, found, *others
        unsplit_TL = _fastest([step_us(window, way, EVEN, price) for way in ways])
        price = replace(price, reason=f"{price.reason}; {_of_split(cost, serving_TL, unsplit_TL)}")
    mean_us = times.mean_us
    return Counterfactual(
        steps=window.steps,
        left_alone_ms=float(mean_par(left_T1)),
        serving_ms=float(mean_par(serving_T1)),
        best_ms=float(mean_par(best_T1)),
        gain=gain,
        price=price,
        step_ms=None if mean_us is None else mean_us / 1e3,
        tokens_per_step=times.tokens_per_step,
        timed_steps=int(times.served_T.sum()),
    )


def step_us(window: Window, way: Serving, split: str, price: TimePrice) -> Float64:
    """Microseconds of each layer's slowest rank in each step, float64 ``[T, L]``; NaN where a layer has no tokens."""
    placement, tables_RLE = way.placement, way.log2phy_RLE
    if not price.curve.linear:
        return split_us(window.heat_TLE, placement, tables_RLE, window.source_RLE, split, price.curve)
    # Where time follows tokens, the hottest rank is the slowest one.
    peak_TL = split_steps(window.heat_TLE, placement, tables_RLE, window.source_RLE, split).peak_TK
    us_TL = price.curve.floor_us + price.curve.slope_us * peak_TL
    return np.where(peak_TL > 0, us_TL, np.nan)


def _fastest(ways: Sequence[Float64]) -> Float64:
    """Of each layer the times of the way that is fastest in the mean, the first of equals, float64 ``[T, L]``."""
    best_TL = ways[0]
    for other_TL in ways[1:]:
        faster_L = mean_par(other_TL, axis=0) < mean_par(best_TL, axis=0)
        best_TL = np.where(faster_L, other_TL, best_TL)
    return best_TL


def _of_split(cost: SplitCost, serving_TL: Float64, unsplit_TL: Float64) -> str:
    """What the stepwise split costs and wins, over the same placements under even shares and without it."""
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


def _widened(gain: Gain, price: TimePrice) -> Gain:
    """The interval with what is not known of the price: it scales both ends."""
    scales = (price.least, price.most)
    return Gain(
        gain.mean,
        min(gain.low * scale for scale in scales),
        max(gain.high * scale for scale in scales),
        gain.error,
    )
