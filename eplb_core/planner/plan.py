"""Result of a decision: the plan, and the expected PAR and gain for the steps that it will serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Float64, Int32, Placement, apply_layers, mean_par
from eplb_core.planner.forecast import NO_FORECASTS, Forecasts
from eplb_core.planner.score import Gain, WindowSplit, gain_of, par_by_step, split_steps
from eplb_core.planner.verdicts import LayerVerdict, MovePrice
from eplb_core.solver.model import Recommendation
from eplb_core.solver.window import inflation, inflation_error

_MIN_STEPS = 32
"""Minimum number of steps needed to estimate the correlation between consecutive steps."""


@dataclass(frozen=True)
class LayerPlan:
    """Change to one layer.

    Parameters
    ----------
    layer
        Index of the layer.
    phy2log_RS
        int32 ``[R, S]``, new placement.
    log2phy_RE
        int32 ``[R, E]``, new table of each source rank; ``[R, E, D]`` for dealing tables.
    moves_M5
        int32 ``[M, 5]``, one row per slot that must receive weights: source rank, source slot, destination rank,
        destination slot, expert. Empty if only the tables change.
    """

    layer: int
    phy2log_RS: Int32
    log2phy_RE: Int32
    moves_M5: Int32


@dataclass(frozen=True)
class Plan:
    """Result of one decision.

    Parameters
    ----------
    layers
        Layers that change, largest gain first.
    verdicts
        Verdict on every layer, in layer order.
    price
        Move price; ``None`` if no layer was solved.
    par_TL
        float64 ``[T, L]``, PAR of each step in the window under the new layout; NaN if there are no tokens.
    recommendations
        Recommendation for each layer that the next decision may follow without a hold-out; ``None`` for layers without
        one. Empty if there are no recommendations.

    Examples
    --------
    A decision that keeps its only layer:

    >>> kept = LayerVerdict(0, par_seen=1.2, par_planned=1.2, noise_floor=1.1, moves=0, changed=False, reason="kept")
    >>> plan = Plan(layers=(), verdicts=(kept,))
    >>> plan.par_seen, plan.par_planned, plan.moves
    (1.2, 1.2, 0)
    """

    layers: tuple[LayerPlan, ...]
    verdicts: tuple[LayerVerdict, ...]
    price: MovePrice | None = None
    par_TL: Float64 = field(default_factory=lambda: np.zeros((0, 0)), repr=False)
    recommendations: Sequence[Recommendation | None] = ()

    def changes(self) -> Iterator[tuple[int, Int32, Int32]]:
        """Iterate over the index, placement and tables of each layer that changes, as ``apply_layers`` expects."""
        return ((layer.layer, layer.phy2log_RS, layer.log2phy_RE) for layer in self.layers)

    @property
    def par_seen(self) -> float:
        """PAR before the decision, averaged over the layers with tokens; NaN if no layer has any."""
        return float(mean_par(np.array([verdict.par_seen for verdict in self.verdicts])))

    @property
    def par_planned(self) -> float:
        """PAR after the decision, averaged over the layers with tokens; NaN if no layer has any."""
        return float(mean_par(np.array([verdict.par_planned for verdict in self.verdicts])))

    @property
    def ms_seen(self) -> float | None:
        """Time per step of each layer's slowest rank before the decision, summed over the layers, in milliseconds.

        ``None`` if there is no cost curve.
        """
        return _sum_ms([verdict.us_seen for verdict in self.verdicts])

    @property
    def ms_planned(self) -> float | None:
        """Time per step after the decision, in milliseconds, as in ``ms_seen``."""
        return _sum_ms([verdict.us_planned for verdict in self.verdicts])

    @property
    def moves(self) -> int:
        """Number of slots that must receive weights, over all layers."""
        return sum(verdict.moves for verdict in self.verdicts)

    @property
    def bytes(self) -> int:
        """Number of bytes of weights to send, over all layers."""
        return sum(verdict.bytes for verdict in self.verdicts)


def _sum_ms(us_of_layers: list[float | None]) -> float | None:
    """Sum the available times and convert them to milliseconds; return ``None`` if no layer has a value."""
    available = [us for us in us_of_layers if us is not None]
    return sum(available) / 1e3 if available else None


@dataclass(frozen=True)
class Promise:
    """Expected PAR per step for each layer and, in the last channel, for the mean over the layers.

    Parameters
    ----------
    mean_C
        float64 ``[L + 1]``, mean PAR of a step; NaN for a layer without tokens.
    variance_C
        float64 ``[L + 1]``, variance of the PAR between steps.
    inflation_C
        float64 ``[L + 1]``, variance inflation of a mean over consecutive steps due to their correlation, relative to
        independent steps; 1 if the window is too short to measure it.
    steps
        Number of steps in the window.
    held_out
        True if the mean is corrected for the optimism of placements that are scored on the window they are fitted to.
    """

    mean_C: Float64
    variance_C: Float64
    inflation_C: Float64
    steps: int
    held_out: bool = True


def promise_of_steps(par_TL: Float64, *, held_out: bool) -> Promise:
    """Return the promise for future steps, assuming that they resemble the steps of a window.

    Parameters
    ----------
    par_TL
        float64 ``[T, L]``, expected PAR of each step in the window under the new layout; NaN if there are no tokens.
    held_out
        True if ``par_TL`` is corrected for the optimism of placements that are scored on the window they are fitted to.

    Examples
    --------
    The last channel is the mean over the layers:

    >>> promise = promise_of_steps(np.array([[1.1, 1.3], [1.2, 1.4]]), held_out=True)
    >>> promise.mean_C.round(3), promise.variance_C.round(3)
    (array([1.15, 1.35, 1.25]), array([0.005, 0.005, 0.005]))
    """
    par_TC = append_mean(par_TL)
    mean_C = mean_par(par_TC, axis=0)
    busy_TC = ~np.isnan(par_TC)
    centred_TC = np.where(busy_TC, par_TC - mean_C, 0.0)
    variance_C = (centred_TC**2).sum(axis=0) / np.maximum(busy_TC.sum(axis=0) - 1, 1)
    inflation_C = np.ones_like(mean_C)
    if len(par_TC) >= _MIN_STEPS:
        # Even for independent steps, the estimate may exceed 1 by chance. Subtract its error so that the test for
        # changes in heat does not lose sensitivity.
        inflation_C = np.maximum(1.0, inflation(centred_TC) - inflation_error(len(par_TC)))
    return Promise(mean_C, variance_C, inflation_C, len(par_TC), held_out)


def append_mean(par_TL: Float64) -> Float64:
    """Append the mean over the layers as the last column, float64 ``[T, L + 1]``; NaN if there are no tokens."""
    return np.column_stack([par_TL, mean_par(par_TL, axis=1)])


@dataclass(frozen=True)
class Layout:
    """Placement and tables of a deployment.

    Parameters
    ----------
    placement
        Placement of all layers.
    log2phy_RLE
        int32 ``[R, L, E]``, table of each source rank; ``[R, L, E, D]`` for dealing tables.
    """

    placement: Placement
    log2phy_RLE: Int32

    def par_of_steps(self, window: Window, split: str) -> Float64:
        """Return the PAR of each step in a window under this layout, float64 ``[T, L]``; NaN if there are no tokens."""
        served = split_steps(window.heat_TLE, self.placement, self.log2phy_RLE, window.source_RLE, split)
        return par_by_step(served)

    def split_of(self, window: Window, split: str) -> WindowSplit:
        """Return the split of tokens over the replicas, computed from a window's heat."""
        return WindowSplit.of(window.heat_TLE, self.placement, self.log2phy_RLE, window.source_RLE, split)

    def changed_by(self, plan: Plan) -> Layout:
        """Return the layout after all layers of a plan are committed."""
        return Layout(*apply_layers(self.placement, self.log2phy_RLE, plan.changes()))


@dataclass(frozen=True)
class Outlook:
    """Expectations and findings of one decision, used to monitor subsequent steps.

    Parameters
    ----------
    promise
        Expected PAR of subsequent steps.
    paid
        True if the gain of the previous change exceeds its standard error; ``None`` if there was no change, or if too
        few steps have been served since then.
    forecasts
        Forecasts of the new layout's gain over the initial layout.
    burst
        True if the last alarm before the decision was not caused by a lasting change in heat.
    change_at
        Value of ``Pace.seen`` at a change in heat that did not raise an alarm; ``None`` if there was no such change.
    too_recent
        True if that change was too recent for a decision.
    recommendations
        As in ``Plan``.
    layout
        Layout that the decision started from; ``None`` if no decision was made.
    planned
        Placement and split after the plan; ``None`` if the plan changes nothing.
    """

    promise: Promise
    paid: bool | None = None
    forecasts: Forecasts = NO_FORECASTS
    burst: bool = False
    change_at: int | None = None
    too_recent: bool = False
    recommendations: Sequence[Recommendation | None] = ()
    layout: Layout | None = None
    planned: WindowSplit | None = None


def promise_of_plan(plan: Plan) -> tuple[Promise, Float64]:
    """Return a plan's promise, and the expected PAR of each step on which it is based, float64 ``[T, L]``.

    The expected PAR includes each layer's optimism as measured by the hold-out.
    """
    optimism_of_layers = [verdict.optimism for verdict in plan.verdicts]
    par_TL = plan.par_TL + np.array([optimism or 0.0 for optimism in optimism_of_layers])
    return promise_of_steps(par_TL, held_out=None not in optimism_of_layers), par_TL


def layout_gain(window: Window, before: Layout, now: Layout, split: str) -> Gain:
    """Return the gain of ``now`` over ``before`` on a window's steps; ``split`` is one of ``settings.SPLITS``."""
    return gain_of(before.par_of_steps(window, split), now.par_of_steps(window, split))
