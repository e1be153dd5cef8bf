"""The slots of experts that have several replicas, and the spanning forest that a stepwise split is rounded along.

Dimensions in names: M slots of experts that have several replicas (*shared* slots), H these experts; R ranks, S slots
of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32

Float64: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SharedSlots:
    """The shared slots of a placement, experts in order, replicas by physical id."""

    expert_M: list[int]
    rank_M: list[int]
    column_M: list[int]
    """Which of its expert's replicas each is."""
    physical_M: list[int]

    @property
    def same_MM(self) -> Float64:
        """1 where two are of one expert."""
        return np.equal.outer(self.expert_M, self.expert_M).astype(np.float64)

    @property
    def first_M(self) -> Float64:
        """1 where a slot is its expert's first."""
        return np.equal(self.column_M, 0).astype(np.float64)

    @property
    def held_H(self) -> list[int]:
        """The experts, in order."""
        return sorted(set(self.expert_M))

    @property
    def of_expert_MH(self) -> Float64:
        """1 where a slot is of an expert."""
        return np.equal.outer(self.expert_M, self.held_H).astype(np.float64)

    @classmethod
    def of(cls, phy2log_RS: Int32) -> SharedSlots:
        """Those of a placement ``[R, S]``."""
        slots = phy2log_RS.shape[1]
        replicas_of: dict[int, list[int]] = {}
        for physical, expert in enumerate(phy2log_RS.ravel().tolist()):
            replicas_of.setdefault(expert, []).append(physical)
        found = [
            (expert, physical // slots, column, physical)
            for expert, replicas in sorted(replicas_of.items())
            if len(replicas) > 1
            for column, physical in enumerate(replicas)
        ]
        return cls(*([row[field] for row in found] for field in range(4)))


@dataclass(frozen=True)
class Forest:
    """A spanning forest of ranks and shared experts, whose edges are slots; and how changes run along it."""

    order_R: list[int]
    """The ranks in the order that a walk from the roots meets them: below every edge they are consecutive."""

    by_rank_MR: Float64
    """float64 ``[M, R]``: what is taken from each slot where so much is cut from the ranks' running sums."""

    by_slot_MM: Float64
    """float64 ``[M, M]``: what is taken from each slot where so much is cut from slots beside the forest."""

    @classmethod
    def of(cls, slots: SharedSlots, ranks: int) -> Forest:
        """A depth-first forest."""
        walk = _Walk(slots, ranks)
        used = len(slots.rank_M)
        by_rank_MR, by_slot_MM = np.zeros((used, ranks)), np.zeros((used, used))
        beside = sorted(set(range(used)) - {branch.slot for branch in walk.branches})
        by_slot_MM[beside, beside] = 1.0
        for branch in walk.branches:
            # Of an expert below, what its ranks take more leaves less for the rank above.
            sign = -1.0 if branch.is_expert else 1.0
            if branch.end > branch.first:
                by_rank_MR[branch.slot, branch.end - 1] += sign
                if branch.first > 0:
                    by_rank_MR[branch.slot, branch.first - 1] -= sign
            for other in beside:
                rank_below = branch.first <= walk.place_R[slots.rank_M[other]] < branch.end
                expert_below = slots.expert_M[other] in branch.experts
                by_slot_MM[branch.slot, other] -= sign * (float(rank_below) - float(expert_below))
        return cls(walk.order_R, by_rank_MR, by_slot_MM)


@dataclass
class _Branch:
    """What hangs below one slot of the forest."""

    slot: int
    is_expert: bool
    """Whether the upper end is a rank and the lower one an expert."""
    first: int
    """Place of the first rank below, in the forest's order."""
    end: int
    experts: set[int]


class _Walk:
    """A depth-first walk of all ranks and shared experts."""

    def __init__(self, slots: SharedSlots, ranks: int) -> None:
        self._slots = slots
        self._of_rank: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
        self._of_expert: dict[int, list[int]] = {}
        for slot, (rank, expert) in enumerate(zip(slots.rank_M, slots.expert_M, strict=True)):
            self._of_rank[rank].append(slot)
            self._of_expert.setdefault(expert, []).append(slot)
        self.order_R: list[int] = []
        self.place_R: dict[int, int] = {}
        self.branches: list[_Branch] = []
        self._met: set[int] = set()
        for rank in range(ranks):
            if rank not in self.place_R:
                self._from_rank(rank)

    def _from_rank(self, rank: int) -> set[int]:
        """Walk on from a rank; the experts met."""
        self.place_R[rank] = len(self.order_R)
        self.order_R.append(rank)
        met: set[int] = set()
        for slot in self._of_rank[rank]:
            expert = self._slots.expert_M[slot]
            if expert not in self._met:
                self._met.add(expert)
                first = len(self.order_R)
                below = self._from_expert(expert)
                self.branches.append(_Branch(slot, True, first, len(self.order_R), below))
                met |= below
        return met

    def _from_expert(self, expert: int) -> set[int]:
        met = {expert}
        for slot in self._of_expert[expert]:
            rank = self._slots.rank_M[slot]
            if rank not in self.place_R:
                first = len(self.order_R)
                below = self._from_rank(rank)
                self.branches.append(_Branch(slot, False, first, len(self.order_R), below))
                met |= below
        return met
