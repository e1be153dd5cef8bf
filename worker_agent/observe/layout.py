"""Layout of an observed engine: its placement, and the split of an expert's tokens over its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Int32, checked_foreign, layer_digest, repaired, without_single_entries
from worker_agent.swap.rank_layout import RankLayout

_MAX_ENTRIES = 12
"""Maximum number of table entries per expert. It gives exactly equal shares to 1, 2, 3, 4, 6 or 12 replicas."""
_ENTRIES = {1: 1, 2: 2, 3: 6}
"""Number of table entries that gives equal shares, by maximum number of replicas per expert."""


@dataclass(frozen=True)
class ObservedLayout:
    """Placement that an engine serves, with tables that describe its split.

    An engine may place an expert twice on one rank, or leave a slot empty. The service accepts neither, so such a slot
    is reported with a different expert, to which the tables send no tokens. The ranks' loads remain correct.

    Parameters
    ----------
    phy2log_LRS
        int32 ``[L, R, S]``, the expert in each slot as the engine serves it, -1 for an empty slot.
    experts
        E, logical experts per layer.
    table_LE
        int32 ``[L, E]``, physical expert that receives this rank's tokens of each expert, if each rank
        uses one replica per expert. ``None`` for an engine that splits tokens evenly over the replicas.

    Examples
    --------
    Expert 0 has two replicas on rank 0 and one on rank 1, which therefore gets a third of its tokens:

    >>> layout = ObservedLayout(np.array([[[0, 0, 1], [2, 3, 0]]], dtype=np.int32), experts=4)
    >>> layout.rank(0).placement.phy2log_LRS.tolist()
    [[[0, 2, 1], [2, 3, 0]]]
    >>> print(layout.shares_LER[0, :3].round(2))
    [[0.67 0.33]
     [1.   0.  ]
     [0.   1.  ]]
    """

    phy2log_LRS: Int32
    experts: int
    table_LE: Int32 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phy2log_LRS", checked_foreign(self.phy2log_LRS, self.experts))

    @property
    def width(self) -> int:
        """D, number of table entries per expert, which depends only on the shape and on the split."""
        _, ranks, slots = self.phy2log_LRS.shape
        if self.table_LE is not None or ranks == 1:
            return 1
        # A replica could also occupy an empty slot, so count empty slots as well.
        return _ENTRIES.get(ranks * slots - self.experts + 1, _MAX_ENTRIES)

    @property
    def shares_LER(self) -> npt.NDArray[np.float32]:
        """Share of each expert's tokens that each rank receives if replicas share evenly, float32 ``[L, E, R]``."""
        layers, ranks, _ = self.phy2log_LRS.shape
        shares_LER = np.zeros((layers, self.experts, ranks), dtype=np.float32)
        layer, rank, slot = np.nonzero(self.phy2log_LRS >= 0)
        np.add.at(shares_LER, (layer, self.phy2log_LRS[layer, rank, slot], rank), 1.0)
        normalised: npt.NDArray[np.float32] = shares_LER / shares_LER.sum(axis=2, keepdims=True)
        return normalised

    def rank(self, rank: int) -> RankLayout:
        """Return the layout of one rank as it is reported to the service, at epoch 0."""
        placement = repaired(self.phy2log_LRS, self.experts, self.phy2log_LRS.shape[2])
        tables_LED = np.stack(
            [
                self._table(served_RS, reported_RS, layer)
                for layer, (served_RS, reported_RS) in enumerate(
                    zip(self.phy2log_LRS, placement.phy2log_LRS, strict=True)
                )
            ]
        )
        return RankLayout.first(rank, placement, without_single_entries(tables_LED))

    def _table(self, served_RS: Int32, reported_RS: Int32, layer: int) -> Int32:
        """Return the table of one layer, int32 ``[E, D]``.

        Parameters
        ----------
        served_RS
            Expert in each slot as the engine serves it.
        reported_RS
            Expert in each slot as it is reported.
        layer
            Index of the layer.
        """
        slots = served_RS.shape[1]
        # The first slot of each expert on each rank is the same in both placements.
        first_RE = np.zeros((len(reported_RS), self.experts), dtype=np.int32)
        for slot in range(slots - 1, -1, -1):
            first_RE[np.arange(len(reported_RS)), reported_RS[:, slot]] = slot
        if self.table_LE is not None:
            rank_E = self.table_LE[layer] // slots
            table_E: Int32 = (rank_E * slots + first_RE[rank_E, np.arange(self.experts)]).astype(np.int32)
            return table_E[:, None]
        rank_P, slot_P = np.nonzero(served_RS >= 0)
        expert_P = served_RS[rank_P, slot_P]
        entry_P = (rank_P * slots + first_RE[rank_P, expert_P])[np.argsort(expert_P, kind="stable")]
        count_E = np.bincount(expert_P, minlength=self.experts)
        start_E = np.cumsum(count_E) - count_E
        table_ED: Int32 = entry_P[start_E[:, None] + np.arange(self.width) % count_E[:, None]].astype(
            np.int32
        )
        return table_ED


def moved(installed: RankLayout, layout: ObservedLayout) -> RankLayout:
    """Return a rank's layout after the engine has moved experts.

    The changed layers add one epoch each, in ascending order, so ranks that notice the same changes at different times
    arrive at the same epochs.

    Parameters
    ----------
    installed
        Layout of the rank so far.
    layout
        New layout of the engine.
    """
    new = layout.rank(installed.rank)
    for layer, phy2log_RS in enumerate(new.placement.phy2log_LRS):
        unchanged = layer_digest(layer, phy2log_RS) == installed.layer_digests[layer]
        if unchanged and np.array_equal(new.log2phy_LE[layer], installed.log2phy_LE[layer]):
            continue
        installed = installed.with_layer(layer, phy2log_RS, new.log2phy_LE[layer])
    return installed


def linear(layers: int, experts: int, ranks: int) -> Int32:
    """Return the placement of expert parallelism without redundant experts: consecutive experts, evenly spread.

    Returns
    -------
    Int32
        int32 ``[L, R, S]``. If the experts cannot be divided evenly, the last ranks have an empty slot.

    Examples
    --------
    >>> linear(layers=1, experts=5, ranks=2).tolist()
    [[[0, 1, 2], [3, 4, -1]]]
    """
    slots = -(-experts // ranks)
    sizes_R = np.full(ranks, experts // ranks) + (np.arange(ranks) < experts % ranks)
    row_RS = np.full((ranks, slots), -1, dtype=np.int32)
    row_RS[np.arange(slots) < sizes_R[:, None]] = np.arange(experts)
    placement_LRS: Int32 = np.broadcast_to(row_RS, (layers, ranks, slots)).copy()
    return placement_LRS


def placement_of_slots(slots: Sequence[Sequence[Sequence[int]]]) -> Int32:
    """Return the placement of ranks that may have different numbers of experts.

    Parameters
    ----------
    slots
        Logical experts of each rank's local slots, by rank and layer.

    Returns
    -------
    numpy.ndarray
        int32 ``[L, R, S]``, -1 for an empty slot.

    Examples
    --------
    >>> placement_of_slots([[[0, 1]], [[2]]]).tolist()
    [[[0, 1], [2, -1]]]
    """
    width = max(len(experts) for rank_slots in slots for experts in rank_slots)
    phy2log_LRS = np.full((len(slots[0]), len(slots), width), -1, dtype=np.int32)
    for rank, rank_slots in enumerate(slots):
        for layer, experts in enumerate(rank_slots):
            phy2log_LRS[layer, rank, : len(experts)] = experts
    return phy2log_LRS


def experts_in_slots(expert_map_E: npt.NDArray[np.integer]) -> list[int]:
    """Return the expert in each of a rank's slots, given each expert's local slot (-1 if it is on another rank).

    Examples
    --------
    >>> experts_in_slots(np.array([-1, 1, 0, -1]))
    [2, 1]
    """
    held = np.flatnonzero(expert_map_E >= 0)
    experts: list[int] = held[np.argsort(expert_map_E[held])].tolist()
    return experts
