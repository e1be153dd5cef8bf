"""Matrices of the stepwise split for one placement, for its rounds and for rounding along a spanning forest.

Dimension suffixes in names: M replica slots (the slots of replicated experts), padded to a number that depends only on
the placement's shape; P all slots, sorted by expert and physical id; R ranks; E logical experts; H replicated experts
(those with several replicas); X ranks followed by replica slots; Y ranks followed by replicated experts, also padded; W
roundings; C kinds of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Int32, PlacementError, checked_foreign

Float64: TypeAlias = npt.NDArray[np.float64]

UNITS = 64.0
"""Units per token. Splits are computed in 64ths of a token before they are rounded."""
_FINE = 2.0**20
"""All matrix entries are multiples of the reciprocal of this number."""
PENALTIES = (0.2, 0.8)
"""Weight of the distance from the projection, relative to the squared loads, for each half of the rounds.

A small penalty evens out ranks that share few experts. A large one identifies the slots that get no tokens, of which
there are many if the experts' popularity is skewed. In experiments, a constant penalty missed the optimum in more of
the skewed steps, and three increasing penalties missed it in more of the random steps.
"""
_RELAXATION = 1.6
"""Over-relaxation factor of a round."""
ROUNDINGS = 16
"""W, the number of roundings that are computed together for a split."""


def max_replica_slots(experts: int, ranks: int, slots: int) -> int:
    """Return the maximum number of replica slots in any placement: two per spare slot, but at most all slots.

    Examples
    --------
    >>> max_replica_slots(experts=6, ranks=2, slots=4), max_replica_slots(experts=3, ranks=2, slots=3)
    (4, 6)
    """
    return min(ranks * slots, 2 * (ranks * slots - experts))


def split_tables(phy2log_RS: Int32, experts: int, replica_slots: int) -> dict[str, npt.NDArray[np.generic]]:
    """Return every tensor of ``StepwiseSplit`` for a placement.

    Parameters
    ----------
    phy2log_RS
        Placement, int32 ``[R, S]``. Engines' own balancers may place an expert in several slots of a rank.
    experts
        E, the number of logical experts.
    replica_slots
        M, the padded number of replica slots.

    Returns
    -------
    dict of str to array
        Tensors, keyed by name.

    Raises
    ------
    PlacementError
        If an expert has no slot or does not exist, or if a slot is empty.
    """
    checked_foreign(phy2log_RS[None], experts)
    if (phy2log_RS < 0).any():
        raise PlacementError("the stepwise split does not support empty slots")
    slots = _ReplicaSlots.of(phy2log_RS)
    ranks = phy2log_RS.shape[0]
    padding = replica_slots - len(slots.rank_M)
    order_R, by_rank_MR, by_slot_MM = _forest(slots, ranks)
    on_rank_RM = np.equal.outer(np.arange(ranks), slots.rank_M).astype(np.float64)
    starts, round_CM2 = _rounds(slots, on_rank_RM, replica_slots)
    constant_XY, exact_XM = _exact(slots, on_rank_RM, order_R)
    first_RY, bound_MR = _bound(slots, on_rank_RM)
    by_sum_MX = np.hstack([by_rank_MR, by_slot_MM])
    # A slot's tokens are a sum of rounded numbers plus a base that depends only on the counts, so the base is a whole
    # number as well.
    base_MY = constant_XY[ranks:] - by_sum_MX @ constant_XY
    totals = ranks + replica_slots // 2
    from_totals = [
        *(_padded(start_MY, replica_slots, totals) for start_MY in starts),
        _padded(constant_XY, ranks + replica_slots, totals),
        _padded(base_MY, replica_slots, totals),
        _padded(first_RY, ranks, totals),
    ]
    physical_P = np.argsort(phy2log_RS, axis=None, kind="stable")
    position_M = np.argsort(physical_P)[slots.physical_M]
    return {
        "physical_P1": np.append(physical_P, 0).astype(np.int32),
        "expert_P": phy2log_RS.ravel()[physical_P].astype(np.int64),
        "expert_M": np.pad(np.array(slots.expert_M, dtype=np.int64), (0, padding)),
        "position_M": np.pad(position_M, (0, padding)),
        "totals_YE": _padded(_totals(slots, phy2log_RS, experts), totals, experts),
        "from_totals": np.vstack(from_totals),
        "rounds_CM2": round_CM2,
        # Half the sum of a state and its absolute value is its positive part.
        "exact_X2": np.tile(_padded(exact_XM / (2 * UNITS), ranks + replica_slots, replica_slots), 2),
        "by_sum_XM": _padded(by_sum_MX.T, ranks + replica_slots, replica_slots),
        "bound_MR": _padded(bound_MR, replica_slots, ranks),
        "later_MM": _padded(
            slots.same_MM * np.less.outer(slots.column_M, slots.column_M), replica_slots, replica_slots
        ),
    }


def rounding_dithers(ranks: int, replica_slots: int) -> Float64:
    """Return the dither that each rounding adds before rounding down, in tokens, ``[W, X]``.

    The first rounding rounds to the nearest token. Each later rounding has one dither for all running sums and a
    different one for each slot. All dithers are multiples of 1 / ``UNITS``, so they are the same on every machine.
    """
    rounding_W1 = np.arange(ROUNDINGS)[:, None]
    slot_M = np.arange(replica_slots)
    units = int(UNITS)
    by_sum_W1 = (units // 2 + rounding_W1 * 3 * units // 8) % units
    # Fibonacci hashing avoids patterns across roundings and slots.
    by_slot_WM = (rounding_W1 * (2 * slot_M + 1) * 40503 + 32768) % 65536 * units // 65536
    return np.hstack([np.repeat(by_sum_W1, ranks, axis=1), by_slot_WM]) / UNITS


def _totals(slots: _ReplicaSlots, phy2log_RS: Int32, experts: int) -> Float64:
    """Return the matrix from counts to totals, ``[Y, E]``.

    The totals are the tokens of each rank's unreplicated experts, followed by the tokens of each replicated expert.
    """
    ranks = phy2log_RS.shape[0]
    replicated_experts = len(slots.expert_H)
    totals_YE = np.zeros((ranks + replicated_experts, experts))
    totals_YE[np.arange(ranks)[:, None], phy2log_RS] = 1.0
    totals_YE[:, slots.expert_H] = 0.0
    totals_YE[ranks + np.arange(replicated_experts), slots.expert_H] = 1.0
    return totals_YE


def _rounds(slots: _ReplicaSlots, on_rank_RM: Float64, replica_slots: int) -> tuple[list[Float64], Float64]:
    """Return the matrices from the totals to each penalty's constant term, and the matrices of all kinds of rounds.

    There is one matrix ``[M, Y]`` per penalty. The matrices of the C kinds of rounds are stacked, ``[C, M, 2 * M]``.

    The first penalty has one kind of round. Each later penalty has two: one for its first round, where prices are still
    in units of the previous penalty, and one for its remaining rounds.
    """
    starts = []
    kinds = []
    for number, penalty in enumerate(PENALTIES):
        start_MY, split_MM = _without_bounds(slots, on_rank_RM, penalty)
        starts.append(_fine(_RELAXATION * UNITS * start_MY))
        if number:
            kinds.append(_relaxed(split_MM, replica_slots, PENALTIES[number - 1] / penalty))
        kinds.append(_relaxed(split_MM, replica_slots, 1.0))
    return starts, np.stack(kinds)


def _without_bounds(slots: _ReplicaSlots, on_rank_RM: Float64, penalty: float) -> tuple[Float64, Float64]:
    """Return the unbounded split as linear functions of the totals, ``[M, Y]``, and of a target, ``[M, M]``.

    Without lower bounds, slots may get negative tokens. The target is the point proposed by the projection. The split
    minimises the squared rank loads plus ``penalty`` times the squared distance from the target, subject to each
    expert's slots adding up to its tokens. The optimality (Karush-Kuhn-Tucker) conditions are linear equations with the
    same matrix for all counts.
    """
    of_expert_MH = slots.of_expert_MH
    slot_count, expert_count = of_expert_MH.shape
    system = np.zeros((slot_count + expert_count, slot_count + expert_count))
    system[:slot_count, :slot_count] = on_rank_RM.T @ on_rank_RM + penalty * np.eye(slot_count)
    system[:slot_count, slot_count:] = of_expert_MH
    system[slot_count:, :slot_count] = of_expert_MH.T
    inverse = np.linalg.inv(system).astype(np.float64)
    start_MY: Float64 = np.hstack(
        [-inverse[:slot_count, :slot_count] @ on_rank_RM.T, inverse[:slot_count, slot_count:]]
    )
    return start_MY, penalty * inverse[:slot_count, :slot_count]


def _exact(slots: _ReplicaSlots, on_rank_RM: Float64, order_R: list[int]) -> tuple[Float64, Float64]:
    """Return matrices that correct a split so that each expert's slots add up to its tokens.

    The first slot of an expert gets the difference. The corrected split is the first matrix times the totals plus the
    second matrix times the split. The result stacks the running sums of the rank loads, in forest order, and the
    tokens of the slots.

    Returns
    -------
    tuple of array
        Matrices for the totals, ``[X, Y]``, and for the split, ``[X, M]``.
    """
    slot_count = len(slots.rank_M)
    ranks = len(order_R)
    first_M1 = slots.first_M[:, None]
    tokens_MY = np.hstack([np.zeros((slot_count, ranks)), first_M1 * slots.of_expert_MH])
    adds_up_MM = np.eye(slot_count) - first_M1 * slots.same_MM
    sums_RM = on_rank_RM[order_R].cumsum(axis=0)
    unreplicated_RY = _padded(np.eye(ranks)[order_R].cumsum(axis=0), ranks, tokens_MY.shape[1])
    constant_XY: Float64 = np.vstack([unreplicated_RY + sums_RM @ tokens_MY, tokens_MY])
    exact_XM: Float64 = np.vstack([sums_RM @ adds_up_MM, adds_up_MM])
    return constant_XY, exact_XM


def _bound(slots: _ReplicaSlots, on_rank_RM: Float64) -> tuple[Float64, Float64]:
    """Return matrices for an upper bound on rank loads: ``[R, Y]`` for the totals and ``[M, R]`` for the slots.

    An expert's first slot gets the tokens that remain after its other slots. If those slots have more tokens than the
    expert, the excess is removed from one of them. No rank can then exceed the bound, because the bound adds the excess
    of all experts to every rank. The bound omits the total tokens of all replicated experts, which is the same for all
    splits of the same counts.
    """
    first_RM = on_rank_RM * slots.first_M
    first_RY: Float64 = np.hstack([np.eye(len(on_rank_RM)), first_RM @ slots.of_expert_MH])
    moved_MR: Float64 = (on_rank_RM - first_RM @ slots.same_MM).T
    return first_RY, moved_MR + 1.0


def _relaxed(split_MM: Float64, replica_slots: int, price_scale: float) -> Float64:
    """Return the matrix for one over-relaxed round, ``[M, 2 * M]``, without the constant term.

    Multiplied by a state's absolute value followed by the state itself, it yields the next state. A state is a split
    minus its prices: a positive entry is the tokens of a slot, and a negative entry is a negated price. A state's
    projection is therefore its positive part, and its absolute value is the sum of split and prices.

    Prices are in units of the penalty. ``price_scale`` converts them when the penalty changes.
    """
    slot_count = split_MM.shape[0]
    step_MM = _RELAXATION * split_MM
    eye_MM = np.eye(slot_count)
    matrix = np.zeros((replica_slots, 2 * replica_slots))
    matrix[:slot_count, :slot_count] = _fine(
        0.5 * ((1 + price_scale) * step_MM + (1 - _RELAXATION - price_scale) * eye_MM)
    )
    matrix[:slot_count, replica_slots : replica_slots + slot_count] = _fine(
        0.5 * ((1 - price_scale) * step_MM + (1 - _RELAXATION + price_scale) * eye_MM)
    )
    return matrix


def _fine(matrix: Float64) -> Float64:
    rounded: Float64 = np.round(matrix * _FINE) / _FINE
    return rounded


def _padded(matrix: Float64, rows: int, columns: int) -> Float64:
    padded = np.zeros((rows, columns))
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


@dataclass(frozen=True)
class _ReplicaSlots:
    """Replica slots of a placement, sorted by expert and physical id."""

    expert_M: list[int]
    rank_M: list[int]
    column_M: list[int]
    """Index of each slot among the replicas of its expert."""
    physical_M: list[int]

    @property
    def same_MM(self) -> Float64:
        """Matrix that is 1 for two slots of the same expert, and 0 otherwise."""
        return np.equal.outer(self.expert_M, self.expert_M).astype(np.float64)

    @property
    def first_M(self) -> Float64:
        """Vector that is 1 for the first slot of each expert, and 0 otherwise."""
        return np.equal(self.column_M, 0).astype(np.float64)

    @property
    def expert_H(self) -> list[int]:
        """Replicated experts, in ascending order."""
        return sorted(set(self.expert_M))

    @property
    def of_expert_MH(self) -> Float64:
        """Matrix that is 1 for a slot and the expert that it holds, and 0 otherwise."""
        return np.equal.outer(self.expert_M, self.expert_H).astype(np.float64)

    @classmethod
    def of(cls, phy2log_RS: Int32) -> _ReplicaSlots:
        """Return the replica slots of a placement ``[R, S]``."""
        slots = phy2log_RS.shape[1]
        replicas_of: dict[int, list[int]] = {}
        for physical, expert in enumerate(phy2log_RS.ravel().tolist()):
            replicas_of.setdefault(expert, []).append(physical)
        rows = [
            (expert, physical // slots, column, physical)
            for expert, replicas in sorted(replicas_of.items())
            if len(replicas) > 1
            for column, physical in enumerate(replicas)
        ]
        return cls(*([row[field] for row in rows] for field in range(4)))


def _forest(slots: _ReplicaSlots, ranks: int) -> tuple[list[int], Float64, Float64]:
    """Walk a depth-first spanning forest whose nodes are ranks and replicated experts, and whose edges are slots.

    Returns
    -------
    order_R : list of int
        Ranks in visiting order. The ranks below an edge are consecutive.
    by_rank_MR : array
        Tokens of each slot in the forest, as a linear combination of the running sums of the rank loads.
    by_slot_MM : array
        Contribution of the slots outside the forest to the tokens of each slot, also as a linear combination.
    """
    slot_count = len(slots.rank_M)
    expert_node_M = [ranks + expert for expert in slots.expert_M]
    edges: dict[int, list[tuple[int, int]]] = {node: [] for node in (*range(ranks), *expert_node_M)}
    for slot, (rank, expert_node) in enumerate(zip(slots.rank_M, expert_node_M, strict=True)):
        edges[rank].append((slot, expert_node))
        edges[expert_node].append((slot, rank))
    # A dict serves as an ordered set of the visited nodes.
    visits: dict[int, None] = {}
    subtree_of: dict[int, list[int]] = {}

    def walk(node: int) -> None:
        visits[node] = None
        for slot, neighbour in edges[node]:
            if neighbour not in visits:
                first = len(visits)
                walk(neighbour)
                subtree_of[slot] = list(visits)[first:]

    for rank in range(ranks):
        if rank not in visits:
            walk(rank)
    order_R = [node for node in visits if node < ranks]
    outside = sorted(set(range(slot_count)) - set(subtree_of))
    by_rank_MR = np.zeros((slot_count, ranks))
    by_slot_MM = np.zeros((slot_count, slot_count))
    by_slot_MM[outside, outside] = 1.0
    for slot, subtree in subtree_of.items():
        # If the node below the edge is an expert, the rank above it gets fewer of the expert's tokens when the ranks
        # below it get more.
        sign = -1.0 if subtree[0] >= ranks else 1.0
        positions = [order_R.index(node) for node in subtree if node < ranks]
        if positions:
            by_rank_MR[slot, positions[-1]] += sign
            if positions[0] > 0:
                by_rank_MR[slot, positions[0] - 1] -= sign
        for outside_slot in outside:
            rank_below = slots.rank_M[outside_slot] in subtree
            expert_below = expert_node_M[outside_slot] in subtree
            by_slot_MM[slot, outside_slot] -= sign * (float(rank_below) - float(expert_below))
    return order_R, by_rank_MR, by_slot_MM
