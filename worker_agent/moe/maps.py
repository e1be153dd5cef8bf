"""Which experts each rank starts with, and the tables that follow from a placement.

Everything here is a pure function of experts, ranks and rank: when an expert-parallel group grows or shrinks, the
tables are computed again. Dimensions in names: R ranks, E logical experts, S slots of one rank, C columns.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum

import numpy as np

from eplb_service.placement import (
    MOST_ENTRIES,
    Int32,
    Placement,
    PlacementError,
    check_layer,
    check_log2phy,
    check_shape,
    dealt_log2phy,
    expert_map,
    without_single_entries,
)


class SpreadStrategy(str, Enum):
    """Which experts share a rank."""

    LINEAR = "linear"
    """Rank 0 has the first experts, rank 1 the next ones, and so on."""

    ROUND_ROBIN = "round_robin"
    """Expert ``e`` is on rank ``e % R``, so that the experts of one group are spread over the ranks."""


@dataclass(frozen=True)
class ExpertSpread:
    """Experts spread evenly over ranks, without redundancy; the first ranks take one more where they do not divide.

    Raises ``PlacementError`` where a rank would stay empty.
    """

    experts: int
    ranks: int
    strategy: SpreadStrategy = SpreadStrategy.LINEAR

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= self.experts:
            raise PlacementError(
                f"{self.experts} experts cannot be spread over {self.ranks} ranks: each must get at least one"
            )

    def slots(self, rank: int) -> int:
        """S, the experts of a rank."""
        return self.experts // self.ranks + (rank < self.experts % self.ranks)

    def local_to_global(self, rank: int) -> Int32:
        """The expert in each slot of a rank, int32 ``[S]``."""
        if not 0 <= rank < self.ranks:
            raise PlacementError(f"there is no rank {rank} among {self.ranks}")
        if self.strategy is SpreadStrategy.ROUND_ROBIN:
            return np.arange(rank, self.experts, self.ranks, dtype=np.int32)
        first = self._first_physical(rank)
        return np.arange(first, first + self.slots(rank), dtype=np.int32)

    def expert_map(self, rank: int) -> Int32:
        """The slot of each expert on a rank, -1 where it has none, int32 ``[E]``."""
        local_E = np.full(self.experts, -1, dtype=np.int32)
        local_E[self.local_to_global(rank)] = np.arange(self.slots(rank), dtype=np.int32)
        return local_E

    def expert_mask(self, rank: int) -> Int32:
        """1 for each expert that is on a rank and 0 for the others, int32 ``[E]``."""
        return (self.expert_map(rank) >= 0).astype(np.int32)

    def physical_to_global(self) -> Int32:
        """The expert in each slot, slots counted over the ranks in order, int32 ``[E]``."""
        return np.concatenate([self.local_to_global(rank) for rank in range(self.ranks)])

    def global_to_physical(self) -> Int32:
        """The inverse of ``physical_to_global``, int32 ``[E]``."""
        return np.argsort(self.physical_to_global()).astype(np.int32)

    def phy2log(self) -> Int32:
        """The layer's placement, int32 ``[R, S]``; raises ``PlacementError`` where experts do not divide evenly."""
        if self.experts % self.ranks:
            raise PlacementError(
                f"{self.experts} experts do not divide evenly over {self.ranks} ranks, as balancing needs; "
                f"add {-self.experts % self.ranks} redundant experts"
            )
        return self.physical_to_global().reshape(self.ranks, -1)

    def _first_physical(self, rank: int) -> int:
        return rank * (self.experts // self.ranks) + min(rank, self.experts % self.ranks)


def usable_strategy(requested: SpreadStrategy, expert_groups: int, redundant: int) -> SpreadStrategy:
    """The strategy to use: round-robin is only for grouped models without redundancy, linear serves all.

    Warns where another strategy is returned than was requested.
    """
    if requested is SpreadStrategy.ROUND_ROBIN and (expert_groups <= 1 or redundant > 0):
        reason = "redundant experts" if redundant > 0 else "no expert groups"
        warnings.warn(f"round_robin cannot be used with {reason}; experts are spread linearly", stacklevel=2)
        return SpreadStrategy.LINEAR
    return requested


def initial_phy2log(
    experts: int,
    ranks: int,
    redundant: int = 0,
    strategy: SpreadStrategy = SpreadStrategy.LINEAR,
    expert_groups: int = 1,
) -> Int32:
    """The placement that a layer starts with, int32 ``[R, S]``.

    Redundant experts come last: after all logical experts in order, replicas of experts 0, 1, and so on.

    Parameters
    ----------
    experts, ranks, redundant
        Logical experts, EP ranks, and slots beyond one per logical expert.
    strategy
        How experts are spread over the ranks where none is redundant.
    expert_groups
        Groups that a router chooses among, as far as they bear on the strategy.

    Raises
    ------
    PlacementError
        Where logical and redundant experts together do not divide evenly over the ranks.
    """
    if redundant < 0:
        raise PlacementError(f"redundant experts must be zero or more, got {redundant}")
    strategy = usable_strategy(strategy, expert_groups, redundant)
    if redundant == 0:
        return ExpertSpread(experts, ranks, strategy).phy2log()
    slots, left_over = divmod(experts + redundant, ranks)
    if left_over:
        raise PlacementError(
            f"{experts} experts and {redundant} redundant ones do not divide evenly over {ranks} ranks; "
            f"use {redundant + ranks - left_over} redundant experts"
        )
    phy2log_RS: Int32 = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0]
    return phy2log_RS


@dataclass(frozen=True)
class RankPlacement:
    """One rank's view of one layer's placement."""

    logical_S: list[int]
    """The logical expert in each local slot."""

    expert_map_E: Int32
    log2phy_E: Int32
    replicas: ReplicaTable
    """Of all experts, on all ranks; as wide as any placement of so many slots needs."""


def rank_placement(
    layer: int,
    experts: int,
    phy2log_RS: Int32,
    rank: int,
    ranks: int,
    log2phy_E: Int32 | None,
    shared_tokens: bool,
    dealing_width: int = 1,
) -> RankPlacement:
    """Check a layer's placement and take ``rank``'s view of it.

    Without ``log2phy_E`` the rank gets its default table of ``dealing_width`` entries, or rank 0's where all ranks see
    the same tokens and must agree. Raises ``PlacementError`` where placement, table and number of ranks do not fit
    together.

    Parameters
    ----------
    layer
        Its number, for messages.
    experts, ranks
        E and R.
    phy2log_RS
        int32 ``[R, S]``, the layer's placement.
    rank
        Whose view it is.
    log2phy_E
        Its table, int32 ``[E]`` or ``[E, D]``.
    shared_tokens
        Whether all ranks see the same tokens, and must agree.
    dealing_width
        Entries of a default table.
    """
    where = f"layer {layer}"
    if phy2log_RS.ndim != 2 or phy2log_RS.shape[0] != ranks:
        found = list(phy2log_RS.shape)
        raise PlacementError(f"{where}: phy2log must have the shape [{ranks} ranks, slots], got {found}")
    try:
        check_shape(experts, ranks, phy2log_RS.shape[1])
    except PlacementError as problem:
        raise PlacementError(f"{where}: {problem}") from problem
    check_layer(phy2log_RS, experts, where)
    if log2phy_E is None:
        if not 1 <= dealing_width <= MOST_ENTRIES:
            raise PlacementError(
                f"{where}: a dealing table has 1 to {MOST_ENTRIES} entries, got {dealing_width}"
            )
        dealt_RED = dealt_log2phy(phy2log_RS, experts, dealing_width)
        log2phy_E = without_single_entries(dealt_RED[0 if shared_tokens else rank])
    if log2phy_E.ndim not in (1, 2) or log2phy_E.shape[0] != experts:
        raise PlacementError(f"{where}: log2phy must have the shape [{experts}], got {list(log2phy_E.shape)}")
    check_log2phy(log2phy_E, phy2log_RS, f"{where}: log2phy", deals=log2phy_E.ndim == 2)
    return RankPlacement(
        phy2log_RS[rank].tolist(),
        expert_map(phy2log_RS[rank], experts),
        log2phy_E,
        replica_table(phy2log_RS, experts, most_replicas(experts, phy2log_RS)),
    )


def most_replicas(experts: int, phy2log_RS: Int32) -> int:
    """The most replicas of an expert that a placement of this shape can have: one per rank, or per spare slot."""
    ranks, slots = phy2log_RS.shape
    return min(int(ranks), int(ranks) * int(slots) - experts + 1)


def check_grouped(layer: int, phy2log_RS: Int32) -> None:
    """Raise ``PlacementError`` unless each rank holds one group of consecutive experts, in whatever order."""
    slots = phy2log_RS.shape[1]
    for rank, logical_S in enumerate(phy2log_RS):
        group = range(rank * slots, (rank + 1) * slots)
        if sorted(logical_S.tolist()) != list(group):
            raise PlacementError(
                f"layer {layer}: grouped experts: rank {rank} must hold experts {group.start}..{group.stop - 1}, "
                f"got {logical_S.tolist()}"
            )


@dataclass(frozen=True)
class ReplicaTable:
    """All replicas of each logical expert of one layer."""

    log2phys_EC: Int32
    """int32 ``[E, C]``: physical ids in ascending order, -1 where an expert has fewer replicas than C."""

    counts_E: Int32
    """int32 ``[E]``."""


def replica_table(phy2log_RS: Int32, experts: int, columns: int | None = None) -> ReplicaTable:
    """The replicas of each expert under a placement; C is the most that any expert has, or ``columns``.

    Raises ``PlacementError`` where the placement is not valid and ``ValueError`` where ``columns`` are too few.
    """
    check_layer(phy2log_RS, experts)
    flat_P = phy2log_RS.ravel()
    counts_E = np.bincount(flat_P, minlength=experts).astype(np.int32)
    most = int(counts_E.max())
    if columns is None:
        columns = most
    elif columns < most:
        raise ValueError(f"an expert has {most} replicas, which do not fit {columns} columns")
    log2phys_EC = np.full((experts, columns), -1, dtype=np.int32)
    by_expert_P = np.argsort(flat_P, kind="stable").astype(np.int32)
    first_E = np.cumsum(counts_E) - counts_E
    column_P = np.arange(flat_P.size) - np.repeat(first_E, counts_E)
    log2phys_EC[flat_P[by_expert_P], column_P] = by_expert_P
    return ReplicaTable(log2phys_EC, counts_E)
