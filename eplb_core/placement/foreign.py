"""Repair of placements from other balancers, so that they can serve as a starting point.

An engine's own balancer may place an expert twice on one rank, mark a slot as empty with -1, or use a different number
of slots per rank. The engine can serve such a placement, but this project does not deploy it. The placement is
repaired instead:

- A second slot for the same expert on one rank has no benefit, so it is refilled with a different expert.
- An empty slot is filled. The new expert's weights must be transferred, so filling the slot counts as a move.
- If the number of slots per rank changes, slot ``s`` of a rank stays slot ``s``. Additional slots start out empty, and
  surplus slots are dropped with their experts.

References
----------
DeepSeek EPLB, https://github.com/deepseek-ai/EPLB, whose packing may place two replicas of an expert on one rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.placement.placement import Placement
from eplb_core.placement.tables import Int32, PlacementError, check_shape

EMPTY = -1
"""Marker for a slot without an expert."""


def checked_foreign(phy2log: npt.ArrayLike, experts: int) -> Int32:
    """Check that another balancer's placement has the right shape and contains every expert.

    Parameters
    ----------
    phy2log
        Integers ``[L, R, S]``, the expert in each slot, or -1 for an empty slot.
    experts
        E, logical experts per layer.

    Returns
    -------
    Int32
        An int32 copy of the placement.

    Raises
    ------
    PlacementError
        If the array has the wrong shape or type, an expert does not exist, or an expert is not in any slot.
    """
    raw = np.asarray(phy2log)
    if raw.ndim != 3 or 0 in raw.shape:
        raise PlacementError(f"expected a placement of shape [layers, ranks, slots], got {list(raw.shape)}")
    if raw.dtype.kind not in "iu":
        raise PlacementError(f"expected a placement of integers, got {raw.dtype}")
    wrong = np.argwhere((raw.astype(np.int64) < EMPTY) | (raw.astype(np.int64) >= experts))
    if wrong.size:
        layer, rank, slot = wrong[0]
        raise PlacementError(
            f"layer {layer}: rank {rank} slot {slot} has expert {raw[layer, rank, slot]}; expected "
            f"0..{experts - 1}, or -1 for an empty slot"
        )
    for layer, raw_RS in enumerate(raw):
        count_E = np.bincount(raw_RS[raw_RS >= 0].astype(np.int64), minlength=experts)
        if (count_E == 0).any():
            raise PlacementError(f"layer {layer}: expert {count_E.argmin()} has no slot")
    checked_LRS: Int32 = np.array(raw, dtype=np.int32, order="C")
    return checked_LRS


def without_duplicates(phy2log_LRS: Int32) -> Int32:
    """Return a copy that keeps only the first slot of each expert on each rank and marks its other slots as empty."""
    first_LRS: Int32 = phy2log_LRS.copy()
    for slot in range(1, phy2log_LRS.shape[2]):
        duplicate_LR = (phy2log_LRS[:, :, :slot] == phy2log_LRS[:, :, slot : slot + 1]).any(axis=2)
        first_LRS[:, :, slot][duplicate_LR] = EMPTY
    return first_LRS


def repaired(
    phy2log_LRS: Int32, experts: int, slots: int, heat_LE: npt.NDArray[np.floating] | None = None
) -> Placement:
    """Turn another balancer's placement into one that can be deployed, moving only the experts that must move.

    Parameters
    ----------
    phy2log_LRS
        int32 ``[L, R, S']`` as ``checked_foreign`` returns it.
    experts
        E, logical experts per layer.
    slots
        Number of slots per rank in the result.
    heat_LE
        ``[L, E]``, tokens of each expert; uniform by default. Empty slots are filled with the experts whose replicas
        are hottest.

    Returns
    -------
    Placement
        The repaired placement, which equals the input if no repair is needed.

    Examples
    --------
    Rank 0 has expert 0 twice and rank 2 has an empty slot. Both slots get a replica of the hottest expert:

    >>> phy2log_LRS = checked_foreign([[[0, 0], [1, 2], [3, -1]]], experts=4)
    >>> repaired(phy2log_LRS, experts=4, slots=2, heat_LE=np.array([[10, 20, 70, 30]])).phy2log_LRS.tolist()
    [[[0, 2], [1, 2], [3, 2]]]
    """
    layers, ranks, deployed_slots = phy2log_LRS.shape
    check_shape(experts, ranks, slots)
    resized_LRS = np.full((layers, ranks, slots), EMPTY, dtype=np.int32)
    common = min(slots, deployed_slots)
    resized_LRS[:, :, :common] = phy2log_LRS[:, :, :common]
    resized_LRS = without_duplicates(resized_LRS)
    for layer, layer_RS in enumerate(resized_LRS):
        heat_E = np.ones(experts) if heat_LE is None else np.asarray(heat_LE[layer], dtype=np.float64)
        _complete(layer_RS, heat_E)
    return Placement(resized_LRS, experts)


def _complete(phy2log_RS: Int32, heat_E: npt.NDArray[np.float64]) -> None:
    """Fill all empty slots of a layer in place, starting with the experts that have no slot, hottest first."""
    replicas_E = np.bincount(phy2log_RS[phy2log_RS >= 0], minlength=heat_E.size)
    # The small extra weight makes an expert with fewer replicas count as hotter, even if no expert has tokens.
    weight_E = heat_E + 1e-9 * max(float(heat_E.sum()), 1.0)
    for expert in sorted(np.flatnonzero(replicas_E == 0), key=lambda e: (-weight_E[e], e)):
        rank, slot = _slot_for(phy2log_RS, replicas_E, weight_E)
        if phy2log_RS[rank, slot] >= 0:
            replicas_E[phy2log_RS[rank, slot]] -= 1
        phy2log_RS[rank, slot] = expert
        replicas_E[expert] += 1
    for rank, slot in np.argwhere(phy2log_RS == EMPTY):
        per_replica_E = weight_E / replicas_E
        per_replica_E[phy2log_RS[rank][phy2log_RS[rank] >= 0]] = -1.0
        hottest = per_replica_E.argmax()
        phy2log_RS[rank, slot] = hottest
        replicas_E[hottest] += 1


def _slot_for(
    phy2log_RS: Int32, replicas_E: npt.NDArray[np.int64], weight_E: npt.NDArray[np.float64]
) -> tuple[int, int]:
    """Choose a slot for an expert without one: an empty slot on the coolest rank, or else the coolest spare replica."""
    per_replica_E = weight_E / np.maximum(replicas_E, 1)
    load_RS = np.where(phy2log_RS >= 0, per_replica_E[phy2log_RS], 0.0)
    empty_RS = phy2log_RS == EMPTY
    if empty_RS.any():
        rank = int(np.where(empty_RS.any(axis=1), load_RS.sum(axis=1), np.inf).argmin())
        return rank, int(empty_RS[rank].argmax())
    spare_RS = np.where(replicas_E[phy2log_RS] > 1, load_RS, np.inf)
    spare_rank, spare_slot = divmod(int(spare_RS.argmin()), spare_RS.shape[1])
    return spare_rank, spare_slot


def as_served(phy2log_LRS: Int32, experts: int) -> Placement:
    """Return another balancer's placement without removing its duplicates, to compute the resulting rank loads.

    An empty slot counts as an additional slot for an expert on the same rank. The result is not validated and must not
    be deployed.
    """
    served_LRS = phy2log_LRS.copy()
    for served_RS in served_LRS:
        count_E = np.bincount(served_RS[served_RS >= 0], minlength=experts)
        for row_S in served_RS:
            rank_experts = row_S[row_S >= 0]
            has_experts = rank_experts.size > 0
            row_S[row_S < 0] = (
                rank_experts[count_E[rank_experts].argmax()] if has_experts else count_E.argmax()
            )
    served_LRS.setflags(write=False)
    placement = object.__new__(Placement)
    object.__setattr__(placement, "phy2log_LRS", served_LRS)
    object.__setattr__(placement, "experts", experts)
    return placement
