"""The result of one decision: the layers that change, and why each layer changes or stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb_service.placement import Float64, Int32, mean_par
from eplb_service.planner.move_price import MovePrice


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
class LayerVerdict:
    """What was decided about one layer, and why.

    All ratios are peak-to-average ratios per step, averaged over the window's steps with tokens.

    Parameters
    ----------
    layer
        Its index.
    par_seen
        Ratio under the placement and tables that serve now; NaN for a layer without tokens.
    par_planned
        The same under what was decided; equal to ``par_seen`` where nothing changes.
    noise_floor
        What token sampling alone gives a perfectly balanced layer: computed for independent draws, or less where
        ranks measurably jump less than that. No placement can win below it. NaN for a layer without tokens.
    moves
        Slots that must receive weights.
    changed
        Whether the layer is in the plan.
    reason
        For operators, one line. Where it names a ratio of episodes it says so: the search sees episodes, not steps.
    hindsight
        What a placement made for this very window would have had, whatever it moved; ``None`` where the decision did
        not look into the layer.
    bytes
        Weights that the moves send; 0 where the host does not report an expert's size.
    us_seen, us_planned
        Microseconds of the slowest rank, mean over the window's steps with tokens, as it serves now and as decided;
        ``None`` without a cost curve or tokens.
    optimism
        How much worse than on the heat that they were fitted to such changes did on other heat (hold-out); 0 for a
        layer that stays, ``None`` where it was not held out.
    """

    layer: int
    par_seen: float
    par_planned: float
    noise_floor: float
    moves: int
    changed: bool
    reason: str
    hindsight: float | None = None
    bytes: int = 0
    us_seen: float | None = None
    us_planned: float | None = None
    optimism: float | None = 0.0

    @property
    def regret(self) -> float | None:
        """What the last decision left to win on this window: the ratio seen less that of hindsight, at least 0."""
        return None if self.hindsight is None else max(0.0, self.par_seen - self.hindsight)


@dataclass(frozen=True)
class Plan:
    """One decision: ``layers`` holds those that change, largest gain first; ``verdicts`` all, in order.

    ``price`` is what moves were priced at, ``None`` where nothing was solved; ``hindsight`` the index, placement and
    tables of each layer that was looked into as solved from scratch for this very window, whatever it moved, as
    ``apply_layers`` takes them.
    """

    layers: tuple[LayerPlan, ...]
    verdicts: tuple[LayerVerdict, ...]
    price: MovePrice | None = None
    hindsight: tuple[tuple[int, Int32, Int32], ...] = ()

    def changes(self) -> Iterator[tuple[int, Int32, Int32]]:
        """Index, placement and tables of each layer that changes, for ``apply_layers``."""
        return ((layer.layer, layer.phy2log_RS, layer.log2phy_RE) for layer in self.layers)

    @property
    def optimism_L(self) -> Float64:
        """How much worse than planned each layer is expected to do on other steps, float64 ``[L]``; 0 where unknown."""
        return np.array([verdict.optimism or 0.0 for verdict in self.verdicts])

    @property
    def held_out(self) -> bool:
        """Whether that is known of every layer that changes."""
        return all(verdict.optimism is not None for verdict in self.verdicts)

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
        """The same after the decision."""
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
