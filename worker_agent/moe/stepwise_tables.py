"""What a placement determines of the stepwise split: matrices of its rounds, and the forest it is rounded along.

Dimensions in names: M slots of experts that have several replicas (*shared* slots), padded to a number that only the
placement's shape determines; P all slots, by expert and physical id; R ranks, E logical experts, X ranks and shared
slots, W ways to round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32, check_layer

Float64: TypeAlias = npt.NDArray[np.float64]

UNITS = 64.0
"""Of a token: the steps that splits are computed in before they are rounded."""
_FINE = 65536.0
"""Entries of matrices are multiples of one over this."""
_PENALTY = 0.3
"""Of departing from the projection, beside squared loads. Between 0.2 and 0.4 the fewest rounds were needed, on
recorded routing of 8 ranks x 5 slots and drawn steps of 32 ranks x 9 slots."""
_RELAXATION = 1.6
WAYS = 16
"""In which a split is rounded, at once."""


def most_shared(experts: int, ranks: int, slots: int) -> int:
    """The most shared slots that a placement can have: two for each spare slot, or all."""
    return min(ranks * slots, 2 * (ranks * slots - experts))


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


def split_tables(phy2log_RS: Int32, experts: int, shared: int) -> dict[str, npt.NDArray[np.generic]]:
    """Every buffer of ``StepwiseSplit`` by name, for a placement int32 ``[R, S]``; ``shared`` is M.

    Raises ``PlacementError`` where the placement is not valid.
    """
    check_layer(phy2log_RS, experts)
    slots, ranks = SharedSlots.of(phy2log_RS), phy2log_RS.shape[0]
    used, forest = len(slots.rank_M), Forest.of(slots, ranks)
    alone_RE, on_rank_RM = _of_ranks(slots, phy2log_RS, experts)
    start_ME, round_MM = _rounds(slots, alone_RE, on_rank_RM)
    known_XE, exact_XM = _exact(slots, alone_RE[forest.order_R], on_rank_RM[forest.order_R])
    first_RE, bound_MR = _bound(slots, alone_RE, on_rank_RM)
    from_counts = np.zeros((2 * (shared + ranks), experts))
    from_counts[:used] = _fine(_RELAXATION * UNITS * start_ME)
    from_counts[shared : shared + ranks + used] = known_XE
    from_counts[2 * shared + ranks :] = first_RE
    by_cut_MX = np.hstack(
        [_padded(forest.by_rank_MR, shared, ranks), _padded(forest.by_slot_MM, shared, shared)]
    )
    physical_P = np.argsort(phy2log_RS, axis=None, kind="stable")
    place_M = np.argsort(physical_P)[slots.physical_M]
    return {
        "physical_P1": np.append(physical_P, 0).astype(np.int32),
        "expert_P": phy2log_RS.ravel()[physical_P].astype(np.int64),
        "expert_M": np.pad(np.array(slots.expert_M, dtype=np.int64), (0, shared - used)),
        "place_M": np.pad(place_M, (0, shared - used)),
        "from_counts": from_counts,
        "round_M2": _relaxed(round_MM, shared),
        "exact_XM": _padded(exact_XM / UNITS, ranks + shared, shared),
        "by_cut_XM": np.ascontiguousarray(by_cut_MX.T),
        "bound_MR": _padded(bound_MR, shared, ranks),
        "later_MM": _padded(slots.same_MM * np.less.outer(slots.column_M, slots.column_M), shared, shared),
    }


def ways_to_round(ranks: int, shared: int) -> Float64:
    """What is added before rounding down, in tokens, ``[W, X]``.

    The first way rounds to the nearest. In the others all running sums have one dither, and each slot one of its own:
    in whole numbers of ``UNITS``, so that they are the same everywhere.
    """
    way_W1, slot_M = np.arange(WAYS)[:, None], np.arange(shared)
    units = int(UNITS)
    by_sum_W1 = (units // 2 + way_W1 * 3 * units // 8) % units
    # Fibonacci hashing: far from any pattern of ways or slots.
    by_slot_WM = (way_W1 * (2 * slot_M + 1) * 40503 + 32768) % 65536 * units // 65536
    return np.hstack([np.repeat(by_sum_W1, ranks, axis=1), by_slot_WM]) / UNITS


def _of_ranks(slots: SharedSlots, phy2log_RS: Int32, experts: int) -> tuple[Float64, Float64]:
    """Which experts each rank holds alone, ``[R, E]``, and which shared slots it has, ``[R, M]``."""
    used, ranks = len(slots.rank_M), phy2log_RS.shape[0]
    count_E = np.bincount(phy2log_RS.ravel(), minlength=experts)
    alone_RE = np.zeros((ranks, experts))
    np.add.at(alone_RE, (np.arange(ranks)[:, None], phy2log_RS), (count_E == 1)[phy2log_RS])
    on_rank_RM = np.zeros((ranks, used))
    on_rank_RM[slots.rank_M, np.arange(used)] = 1.0
    return alone_RE, on_rank_RM


def _rounds(slots: SharedSlots, alone_RE: Float64, on_rank_RM: Float64) -> tuple[Float64, Float64]:
    """The split without bounds: start ``[M, E]`` of the counts, plus ``[M, M]`` of what the projection asks for.

    Least squared rank loads and ``_PENALTY`` times the squared distance from the projection, where each expert's slots
    add up to its tokens: linear equations (Karush, Kuhn, Tucker) with one matrix for all counts.
    """
    used, experts = len(slots.rank_M), alone_RE.shape[1]
    held, expert_M = np.unique(np.array(slots.expert_M, dtype=np.int64), return_inverse=True)
    adds_up_HM = np.zeros((held.size, used))
    adds_up_HM[expert_M, np.arange(used)] = 1.0
    system = np.zeros((used + held.size, used + held.size))
    system[:used, :used] = on_rank_RM.T @ on_rank_RM + _PENALTY * np.eye(used)
    system[:used, used:] = adds_up_HM.T
    system[used:, :used] = adds_up_HM
    solved = np.linalg.inv(system).astype(np.float64)
    held_HE = np.zeros((held.size, experts))
    held_HE[np.arange(held.size), held] = 1.0
    start_ME: Float64 = solved[:used, used:] @ held_HE - solved[:used, :used] @ on_rank_RM.T @ alone_RE
    return start_ME, _PENALTY * solved[:used, :used]


def _exact(slots: SharedSlots, alone_RE: Float64, on_rank_RM: Float64) -> tuple[Float64, Float64]:
    """From counts, ``[X, E]``, and from a split that need not add up, ``[X, M]``: one that does, as it is rounded.

    Ranks, in the forest's order, have the running sums of their loads; slots their tokens. What an expert's slots lack
    the first one is given.
    """
    used = len(slots.rank_M)
    first_M = np.equal(slots.column_M, 0).astype(np.float64)
    tokens_ME = np.zeros((used, alone_RE.shape[1]))
    tokens_ME[np.arange(used), slots.expert_M] = first_M
    adds_up_MM = np.eye(used) - first_M[:, None] * slots.same_MM
    sums_RM = on_rank_RM.cumsum(axis=0)
    known_XE: Float64 = np.vstack([alone_RE.cumsum(axis=0) + sums_RM @ tokens_ME, tokens_ME])
    exact_XM: Float64 = np.vstack([sums_RM @ adds_up_MM, adds_up_MM])
    return known_XE, exact_XM


def _bound(slots: SharedSlots, alone_RE: Float64, on_rank_RM: Float64) -> tuple[Float64, Float64]:
    """What bounds the ranks' loads once slots add up: of counts, ``[R, E]``, and of slots' tokens, ``[M, R]``.

    An expert's first slot has what the others leave. Where these have too much it would be below zero: that is taken
    from one of them, and makes no rank hotter than by all that slots have too much. The bound leaves out what is the
    same for all splits of the same counts, the sum of the shared experts' tokens.
    """
    first_M = np.equal(slots.column_M, 0)
    first_RE = alone_RE.copy()
    first_RE[
        np.array(slots.rank_M, dtype=np.int64)[first_M], np.array(slots.expert_M, dtype=np.int64)[first_M]
    ] = 1.0
    first_of_MM = slots.same_MM * first_M
    moved_MR: Float64 = (np.eye(len(first_M)) - first_of_MM) @ on_rank_RM.T
    return first_RE, moved_MR + 1.0


def _relaxed(round_MM: Float64, shared: int) -> Float64:
    """One over-relaxed round but for the start: the next state of [sizes, state] stacked, float64 ``[M, 2 * M]``.

    The state is the split less its price: where it is positive it is a split, where it is negative a price. So the
    projection is the positive part, and what the product is taken of is the size.
    """
    used = round_MM.shape[0]
    relaxed = np.zeros((shared, 2 * shared))
    relaxed[:used, :used] = _fine(_RELAXATION * (round_MM - 0.5 * np.eye(used)))
    relaxed[:used, shared : shared + used] = _fine((1 - 0.5 * _RELAXATION) * np.eye(used))
    return relaxed


def _fine(matrix: Float64) -> Float64:
    rounded: Float64 = np.round(matrix * _FINE) / _FINE
    return rounded


def _padded(matrix: Float64, rows: int, columns: int) -> Float64:
    padded = np.zeros((rows, columns))
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


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
