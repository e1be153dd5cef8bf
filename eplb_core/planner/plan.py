"""Result of one decision: the layers that change, why each layer changes or stays, and what is promised of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Float64, Int32, Placement, apply_layers, mean_par
from eplb_core.planner.forecast import NO_FORECASTS, Forecasts
from eplb_core.planner.score import Gain, KnownSplit, gain_of, par_by_step, split_steps
from eplb_core.planner.verdicts import LayerVerdict, MovePrice
from eplb_core.solver.model import Recommendation
from eplb_core.solver.window import inflation, inflation_error

_MIN_STEPS = 32
"""Steps below which nothing is learned of how neighbouring steps resemble each other."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer that changes.

    Parameters
    ----------
    layer
        Its index.
    phy2log_RS
        int32 ``[R, S]``, the new placement.
    log2phy_RE
        int32 ``[R, E]``, the new table of each source rank; ``[R, E, D]`` where they deal.
    moves_M5
        int32 ``[M, 5]``: source rank, source slot, destination rank, destination slot, expert; one row per slot that
        must receive weights. Empty where only the tables change.
    """

    layer: int
    phy2log_RS: Int32
    log2phy_RE: Int32
    moves_M5: Int32


@dataclass(frozen=True)
class Plan:
    """One decision: ``layers`` holds those that change, largest gain first; ``verdicts`` all, in order.

    ``price`` is what moves were priced at, ``None`` where nothing was solved; ``par_TL`` float64 ``[T, L]`` the ratio
    of each step of the window under what will serve, NaN without tokens; ``recommendations`` what the next decision
    may follow in each layer without a hold-out, empty for none.
    """

    layers: tuple[LayerPlan, ...]
    verdicts: tuple[LayerVerdict, ...]
    price: MovePrice | None = None
    par_TL: Float64 = field(default_factory=lambda: np.zeros((0, 0)), repr=False)
    recommendations: Sequence[Recommendation | None] = ()

    def changes(self) -> Iterator[tuple[int, Int32, Int32]]:
        """Index, placement and tables of each layer that changes, for ``apply_layers``."""
        return ((layer.layer, layer.phy2log_RS, layer.log2phy_RE) for layer in self.layers)

    @property
    def par_seen(self) -> float:
        """Mean over the layers that had tokens, before the decision; NaN where none had."""
        return float(mean_par(np.array([verdict.par_seen for verdict in self.verdicts])))

    @property
    def par_planned(self) -> float:
        """Mean over the layers that had tokens, after the decision; NaN where none had."""
        return float(mean_par(np.array([verdict.par_planned for verdict in self.verdicts])))

    @property
    def ms_seen(self) -> float | None:
        """Milliseconds of the slowest ranks of all layers together in a step, before; ``None`` without a cost curve."""
        return _ms([verdict.us_seen for verdict in self.verdicts])

    @property
    def ms_planned(self) -> float | None:
        """Milliseconds as in ``ms_seen``, after the decision."""
        return _ms([verdict.us_planned for verdict in self.verdicts])

    @property
    def moves(self) -> int:
        """Slots that must receive weights, over all layers."""
        return sum(verdict.moves for verdict in self.verdicts)

    @property
    def bytes(self) -> int:
        """Weights that the moves send, over all layers."""
        return sum(verdict.bytes for verdict in self.verdicts)


def _ms(us_of_layers: list[float | None]) -> float | None:
    known = [us for us in us_of_layers if us is not None]
    return sum(known) / 1e3 if known else None


@dataclass(frozen=True)
class Promise:
    """The ratio per step that is expected of each layer, and of the mean over the layers, its last entry.

    Parameters
    ----------
    mean_C, variance_C
        float64 ``[L + 1]``, of one step; NaN for a layer without tokens.
    inflation_C
        float64 ``[L + 1]``, how much more a mean over steps in a row scatters than one over independent steps; 1 where
        too few were seen.
    steps
        Steps that it was made from.
    held_out
        Whether the mean allows for what a placement does worse on steps that it was not fitted to.
    """

    mean_C: Float64
    variance_C: Float64
    inflation_C: Float64
    steps: int
    held_out: bool = True


def promise_of(par_TL: Float64, *, held_out: bool) -> Promise:
    """The promise of what serves these steps so.

    Parameters
    ----------
    par_TL
        float64 ``[T, L]``, the ratio expected of each step of the window under what will serve; NaN without tokens.
    held_out
        Whether that allows for what a placement does worse on steps that it was not fitted to.
    """
    par_TC = channels_of(par_TL)
    known_TC, mean_C = ~np.isnan(par_TC), mean_par(par_TC, axis=0)
    centred_TC = np.where(known_TC, par_TC - mean_C, 0.0)
    variance_C = (centred_TC**2).sum(axis=0) / np.maximum(known_TC.sum(axis=0) - 1, 1)
    inflation_C = np.ones_like(mean_C)
    if len(par_TC) >= _MIN_STEPS:
        # What independent steps would show by themselves is taken off, or a change would be looked for too bluntly.
        inflation_C = np.maximum(1.0, inflation(centred_TC) - inflation_error(len(par_TC)))
    return Promise(mean_C, variance_C, inflation_C, len(par_TC), held_out)


def channels_of(par_TL: Float64) -> Float64:
    """Ratios of the layers and, last, of their mean, float64 ``[T, L + 1]``; NaN where there are no tokens."""
    return np.column_stack([par_TL, mean_par(par_TL, axis=1)])


@dataclass(frozen=True)
class Layout:
    """Placement that ranks serve by, and int32 ``[R, L, E]`` the table of each source rank."""

    placement: Placement
    log2phy_RLE: Int32

    def par_of_steps(self, window: Window, split: str) -> Float64:
        """Ratio of each step of a window under it, float64 ``[T, L]``; NaN without tokens."""
        served = self.placement, self.log2phy_RLE, window.source_RLE
        return par_by_step(split_steps(window.heat_TLE, *served, split))

    def split_of(self, window: Window, split: str) -> KnownSplit:
        """Return the split of tokens over the replicas, worked out from the heat of a window."""
        return KnownSplit.of(window.heat_TLE, self.placement, self.log2phy_RLE, window.source_RLE, split)

    def changed_by(self, plan: Plan) -> Layout:
        """Placement and tables once all of a plan has switched."""
        return Layout(*apply_layers(self.placement, self.log2phy_RLE, plan.changes()))


@dataclass(frozen=True)
class Outlook:
    """Watch list that one decision leaves.

    Parameters
    ----------
    promise
        What is expected of the steps that its result serves.
    paid
        Whether the change before it won more than its error; ``None`` where there was none, or that is not known.
    forecasts
        Of what its result wins over what served at first; without a gain where that is not known.
    burst, change_at
        True if the alarm before the decision was no change of heat; the value of ``Pace.seen`` at a change that raised
        no alarm, or ``None``.
    too_recent, cost
        True if that change was too recent to decide on; steps that pay for the decision's CPU.
    recommendations
        As in ``Plan``.
    planned
        Placement and split after the decision's plan; ``None`` if it changes nothing.
    """

    promise: Promise
    paid: bool | None = None
    forecasts: Forecasts = NO_FORECASTS
    burst: bool = False
    change_at: int | None = None
    too_recent: bool = False
    cost: float = 0.0
    recommendations: Sequence[Recommendation | None] = ()
    planned: KnownSplit | None = None


def promise_for(plan: Plan) -> tuple[Promise, Float64]:
    """Promise of a plan for steps like those of its window, and the ratios that it is of, float64 ``[T, L]``."""
    optimism = [verdict.optimism for verdict in plan.verdicts]
    # Placements do so much worse on steps that they were not fitted to.
    par_TL = plan.par_TL + np.array([one or 0.0 for one in optimism])
    return promise_of(par_TL, held_out=None not in optimism), par_TL


def gain_over(window: Window, before: Layout, now: Layout, split: str) -> Gain:
    """Gain of ``now`` over ``before`` on a window's steps; ``split`` is one of ``settings.SPLITS``."""
    return gain_of(before.par_of_steps(window, split), now.par_of_steps(window, split))
