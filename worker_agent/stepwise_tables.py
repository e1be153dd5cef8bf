"""Tables of the stepwise split under a placement: matrices of its rounds, and the forest it is rounded along.

Dimensions in names: M slots of experts that have several replicas (*shared* slots), padded to a number that only the
placement's shape determines; P all slots, by expert and physical id; R ranks, E logical experts, H those with
several replicas; X ranks and shared slots; Y ranks and experts with several replicas, padded too; W ways to round; C
kinds of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Int32, check_layer

Float64: TypeAlias = npt.NDArray[np.float64]

UNITS = 64.0
"""Of a token: the steps that splits are computed in before they are rounded."""
_FINE = 2.0**20
"""Entries of matrices are multiples of one over this."""
PENALTIES = (0.2, 0.8)
"""Of departing from the projection, beside squared loads: of the first half of the rounds, and of the second. A small
one evens out ranks that are loosely connected; a large one finds out which slots get no tokens, and many get none where
popularity is skewed. One for all rounds missed more skewed steps, three that grow further more drawn ones."""
_RELAXATION = 1.6
WAYS = 16
"""In which a split is rounded, at once."""


def most_shared(experts: int, ranks: int, slots: int) -> int:
    """Return the most shared slots that a placement can have: two for each spare slot, or all."""
    return min(ranks * slots, 2 * (ranks * slots - experts))


def split_tables(phy2log_RS: Int32, experts: int, shared: int) -> dict[str, npt.NDArray[np.generic]]:
    """Compute every buffer of ``StepwiseSplit`` by name, for a placement int32 ``[R, S]``; ``shared`` is M.

    Raises ``PlacementError`` where the placement is not valid.
    """
    check_layer(phy2log_RS, experts)
    slots, ranks = _SharedSlots.of(phy2log_RS), phy2log_RS.shape[0]
    used = len(slots.rank_M)
    order_R, by_rank_MR, by_slot_MM = _forest(slots, ranks)
    on_rank_RM = np.equal.outer(np.arange(ranks), slots.rank_M).astype(np.float64)
    starts, round_CM2 = _rounds(slots, on_rank_RM, shared)
    known_XY, exact_XM = _exact(slots, on_rank_RM, order_R)
    first_RY, bound_MR = _bound(slots, on_rank_RM)
    by_sum_MX = np.hstack([by_rank_MR, by_slot_MM])
    # The forest's slots carry what sums say, so that what is left depends on counts alone, in whole tokens.
    uncut_MY = known_XY[ranks:] - by_sum_MX @ known_XY
    parts, rows = ranks + shared // 2, (*[shared] * len(PENALTIES), ranks + shared, shared, ranks)
    from_counts = (*starts, known_XY, uncut_MY, first_RY)
    physical_P = np.argsort(phy2log_RS, axis=None, kind="stable")
    place_M = np.argsort(physical_P)[slots.physical_M]
    return {
        "physical_P1": np.append(physical_P, 0).astype(np.int32),
        "expert_P": phy2log_RS.ravel()[physical_P].astype(np.int64),
        "expert_M": np.pad(np.array(slots.expert_M, dtype=np.int64), (0, shared - used)),
        "place_M": np.pad(place_M, (0, shared - used)),
        "parts_YE": _padded(_parts(slots, phy2log_RS, experts), parts, experts),
        "from_parts": np.vstack([_padded(of_Y, n, parts) for of_Y, n in zip(from_counts, rows, strict=True)]),
        "rounds_CM2": round_CM2,
        # Half of a state and its size together is its positive part.
        "exact_X2": np.tile(_padded(exact_XM / (2 * UNITS), ranks + shared, shared), 2),
        "by_sum_XM": _padded(by_sum_MX.T, ranks + shared, shared),
        "bound_MR": _padded(bound_MR, shared, ranks),
        "later_MM": _padded(slots.same_MM * np.less.outer(slots.column_M, slots.column_M), shared, shared),
    }


def ways_to_round(ranks: int, shared: int) -> Float64:
    """Return the dithers added before rounding down, in tokens, ``[W, X]``.

    The first way rounds to the nearest. In the others all running sums have one dither, and each slot one of its own:
    in whole numbers of ``UNITS``, so that they are the same everywhere.
    """
    way_W1, slot_M = np.arange(WAYS)[:, None], np.arange(shared)
    units = int(UNITS)
    by_sum_W1 = (units // 2 + way_W1 * 3 * units // 8) % units
    # Fibonacci hashing: far from any pattern of ways or slots.
    by_slot_WM = (way_W1 * (2 * slot_M + 1) * 40503 + 32768) % 65536 * units // 65536
    return np.hstack([np.repeat(by_sum_W1, ranks, axis=1), by_slot_WM]) / UNITS


def _parts(slots: _SharedSlots, phy2log_RS: Int32, experts: int) -> Float64:
    """Return the parts of the counts, ``[Y, E]``: each rank's of experts that it holds alone, then shared experts'."""
    ranks, held = phy2log_RS.shape[0], len(slots.held_H)
    parts_YE = np.zeros((ranks + held, experts))
    parts_YE[np.arange(ranks)[:, None], phy2log_RS] = 1.0
    parts_YE[:, slots.held_H] = 0.0
    parts_YE[ranks + np.arange(held), slots.held_H] = 1.0
    return parts_YE


def _rounds(slots: _SharedSlots, on_rank_RM: Float64, shared: int) -> tuple[list[Float64], Float64]:
    """Return the starts of rounds, ``[M, Y]`` for each penalty, and the matrices ``[C, M, 2 * M]`` of all kinds.

    A kind for the first penalty; for each of the others one for its first round, to which prices come in units of the
    penalty before, and one for the rest.
    """
    starts, kinds = [], []
    for number, penalty in enumerate(PENALTIES):
        start_MY, split_MM = _without_bounds(slots, on_rank_RM, penalty)
        starts.append(_fine(_RELAXATION * UNITS * start_MY))
        if number:
            kinds.append(_relaxed(split_MM, shared, PENALTIES[number - 1] / penalty))
        kinds.append(_relaxed(split_MM, shared, 1.0))
    return starts, np.stack(kinds)


def _without_bounds(slots: _SharedSlots, on_rank_RM: Float64, penalty: float) -> tuple[Float64, Float64]:
    """The split without bounds: of the counts' parts, ``[M, Y]``, plus of what the projection asks for, ``[M, M]``.

    Least squared rank loads and ``penalty`` times the squared distance from the projection, where each expert's slots
    add up to its tokens: linear equations (Karush, Kuhn, Tucker) with one matrix for all counts.
    """
    of_expert_MH = slots.of_expert_MH
    used, held = of_expert_MH.shape
    system = np.zeros((used + held, used + held))
    system[:used, :used] = on_rank_RM.T @ on_rank_RM + penalty * np.eye(used)
    system[:used, used:] = of_expert_MH
    system[used:, :used] = of_expert_MH.T
    solved = np.linalg.inv(system).astype(np.float64)
    start_MY: Float64 = np.hstack([-solved[:used, :used] @ on_rank_RM.T, solved[:used, used:]])
    return start_MY, penalty * solved[:used, :used]


def _exact(slots: _SharedSlots, on_rank_RM: Float64, order_R: list[int]) -> tuple[Float64, Float64]:
    """Return matrices ``[X, Y]``, ``[X, M]`` that make counts' parts, and a split that need not add up, one that does.

    Ranks, in the forest's order, have the running sums of their loads; slots their tokens. What an expert's slots lack
    the first one is given.
    """
    used, ranks = len(slots.rank_M), len(order_R)
    first_M1 = slots.first_M[:, None]
    tokens_MY = np.hstack([np.zeros((used, ranks)), first_M1 * slots.of_expert_MH])
    adds_up_MM = np.eye(used) - first_M1 * slots.same_MM
    sums_RM = on_rank_RM[order_R].cumsum(axis=0)
    alone_RY = _padded(np.eye(ranks)[order_R].cumsum(axis=0), ranks, tokens_MY.shape[1])
    known_XY: Float64 = np.vstack([alone_RY + sums_RM @ tokens_MY, tokens_MY])
    exact_XM: Float64 = np.vstack([sums_RM @ adds_up_MM, adds_up_MM])
    return known_XY, exact_XM


def _bound(slots: _SharedSlots, on_rank_RM: Float64) -> tuple[Float64, Float64]:
    """Return the bound of loads once slots add up: matrices of the counts' parts, ``[R, Y]``, and slots', ``[M, R]``.

    An expert's first slot has what the others leave. Where these have too much it would be below zero: that is taken
    from one of them, and makes no rank hotter than by all that slots have too much. The bound leaves out what is the
    same for all splits of the same counts, the sum of the shared experts' tokens.
    """
    first_RM = on_rank_RM * slots.first_M
    first_RY: Float64 = np.hstack([np.eye(len(on_rank_RM)), first_RM @ slots.of_expert_MH])
    moved_MR: Float64 = (on_rank_RM - first_RM @ slots.same_MM).T
    return first_RY, moved_MR + 1.0


def _relaxed(split_MM: Float64, shared: int, rescaled: float) -> Float64:
    """One over-relaxed round but for the start: the next state of [sizes, state] stacked, float64 ``[M, 2 * M]``.

    The state is the split less its price: where it is positive it is a split, where it is negative a price. So the
    projection is the positive part, and what the product is taken of, split and price together, is the size. Prices
    are in units of the penalty: where that is another one than before, they are ``rescaled``.
    """
    used = split_MM.shape[0]
    asked_MM, eye_MM = _RELAXATION * split_MM, np.eye(used)
    relaxed = np.zeros((shared, 2 * shared))
    relaxed[:used, :used] = _fine(0.5 * ((1 + rescaled) * asked_MM + (1 - _RELAXATION - rescaled) * eye_MM))
    relaxed[:used, shared : shared + used] = _fine(
        0.5 * ((1 - rescaled) * asked_MM + (1 - _RELAXATION + rescaled) * eye_MM)
    )
    return relaxed


def _fine(matrix: Float64) -> Float64:
    rounded: Float64 = np.round(matrix * _FINE) / _FINE
    return rounded


def _padded(matrix: Float64, rows: int, columns: int) -> Float64:
    padded = np.zeros((rows, columns))
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


@dataclass(frozen=True)
class _SharedSlots:
    """The shared slots of a placement, experts in order, replicas by physical id."""

    expert_M: list[int]
    rank_M: list[int]
    column_M: list[int]
    """Number among its expert's replicas."""
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
    def of(cls, phy2log_RS: Int32) -> _SharedSlots:
        """Find the shared slots of a placement ``[R, S]``."""
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


def _forest(slots: _SharedSlots, ranks: int) -> tuple[list[int], Float64, Float64]:
    """Walk a depth-first spanning forest of ranks and shared experts, whose edges are slots.

    Returns the ranks in the order that the walk meets them: below every edge they are consecutive. And how changes run
    along the forest: what is taken from each slot where so much is cut from the ranks' running sums, ``[M, R]``, and
    where so much is cut from slots beside the forest, ``[M, M]``.
    """
    used = len(slots.rank_M)
    expert_M = [ranks + expert for expert in slots.expert_M]
    edges: dict[int, list[tuple[int, int]]] = {node: [] for node in (*range(ranks), *expert_M)}
    for slot, (rank, expert) in enumerate(zip(slots.rank_M, expert_M, strict=True)):
        edges[rank].append((slot, expert))
        edges[expert].append((slot, rank))
    met: dict[int, None] = {}
    below_of: dict[int, list[int]] = {}
    by_rank_MR, by_slot_MM = np.zeros((used, ranks)), np.zeros((used, used))

    def walk(node: int) -> None:
        met[node] = None
        for slot, other in edges[node]:
            if other not in met:
                first = len(met)
                walk(other)
                below_of[slot] = list(met)[first:]

    for rank in range(ranks):
        if rank not in met:
            walk(rank)
    order_R = [node for node in met if node < ranks]
    beside = sorted(set(range(used)) - set(below_of))
    by_slot_MM[beside, beside] = 1.0
    for slot, below in below_of.items():
        # Of an expert below, what its ranks take more leaves less for the rank above.
        sign = -1.0 if below[0] >= ranks else 1.0
        places = [order_R.index(node) for node in below if node < ranks]
        if places:
            by_rank_MR[slot, places[-1]] += sign
            if places[0] > 0:
                by_rank_MR[slot, places[0] - 1] -= sign
        for other in beside:
            rank_below, expert_below = slots.rank_M[other] in below, expert_M[other] in below
            by_slot_MM[slot, other] -= sign * (float(rank_below) - float(expert_below))
    return order_R, by_rank_MR, by_slot_MM
