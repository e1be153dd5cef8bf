"""How logical experts are spread over ranks before any balancing, and the tables that follow from it.

Everything here is a pure function of experts, ranks and rank: when an expert-parallel group grows or shrinks,
the tables are made anew. Dimensions in names: R ranks, E logical experts, S slots of one rank.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum

import numpy as np

from eplb_service.placement import Int32, Placement, PlacementError


class SpreadStrategy(str, Enum):
    """Which experts stand together on a rank."""

    LINEAR = "linear"
    """Rank 0 has the first experts, rank 1 the next ones, and so on."""

    ROUND_ROBIN = "round_robin"
    """Expert ``e`` stands on rank ``e % R``, so that the experts of one group are spread over the ranks."""


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
        """1 for each expert that stands on a rank and 0 for the others, int32 ``[E]``."""
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

    Redundant experts come last: after all logical experts in order, copies of experts 0, 1, and so on. Raises
    ``PlacementError`` where logical and redundant experts together do not divide evenly over the ranks.
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
