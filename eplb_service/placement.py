"""Which expert stands in which slot: the one truth, and everything that is derived from it.

``phy2log_LRS`` (layers, ranks, slots) is the placement. ``expert_map`` and the default ``log2phy`` follow from it
here and nowhere else, for the service, the agents and the tests alike. Dimensions in names: L layers, R ranks,
S slots a rank, E logical experts, M moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
"""An int32 array; its dimensions stand in the variable's name."""

# Digests fit a signed 64-bit integer, so that ranks can compare them by an integer all-reduce.
_DIGEST_MASK = (1 << 63) - 1


class PlacementError(ValueError):
    """A placement, table or move list that no set of ranks could serve; the message says where and why."""


@dataclass(frozen=True)
class Placement:
    """Logical experts of all slots of a deployment.

    Parameters
    ----------
    phy2log_LRS
        int32 ``[L, R, S]``, the logical expert in each slot; slot ``s`` of rank ``r`` has the physical id ``r*S + s``.
    experts
        E, logical experts per layer.

    Raises
    ------
    PlacementError
        Where an expert is out of range, missing, or twice on one rank.
    """

    phy2log_LRS: Int32
    experts: int

    def __post_init__(self) -> None:
        array = np.asarray(self.phy2log_LRS)
        if array.ndim != 3:
            raise PlacementError(f"a placement has the shape [layers, ranks, slots], got {list(array.shape)}")
        if array.dtype.kind not in "iu":
            raise PlacementError(f"a placement holds integers, got {array.dtype}")
        frozen = np.array(array, dtype=np.int32, order="C", copy=True)
        if not np.array_equal(frozen, array):
            raise PlacementError("a placement holds expert ids past the range of int32")
        frozen.setflags(write=False)
        object.__setattr__(self, "phy2log_LRS", frozen)
        check_shape(self.experts, self.ranks, self.slots)
        for layer in range(self.layers):
            check_layer(frozen[layer], self.experts, where=f"layer {layer}")

    @property
    def layers(self) -> int:
        """L."""
        return int(self.phy2log_LRS.shape[0])

    @property
    def ranks(self) -> int:
        """R."""
        return int(self.phy2log_LRS.shape[1])

    @property
    def slots(self) -> int:
        """S, slots per rank."""
        return int(self.phy2log_LRS.shape[2])

    @property
    def redundant(self) -> int:
        """Slots beyond one per expert, per layer."""
        return self.ranks * self.slots - self.experts

    @classmethod
    def linear(cls, layers: int, experts: int, ranks: int, slots: int) -> Placement:
        """The layout that vLLM starts from: all logical experts in order, then copies from expert 0 on."""
        check_shape(experts, ranks, slots)
        row_RS = (np.arange(ranks * slots, dtype=np.int32) % experts).reshape(ranks, slots)
        return cls(np.broadcast_to(row_RS, (layers, ranks, slots)), experts)

    def replicas(self) -> Int32:
        """Copies of each expert, int32 ``[L, E]``."""
        return np.stack([replica_counts(layer_RS, self.experts) for layer_RS in self.phy2log_LRS])

    def expert_map(self, rank: int) -> Int32:
        """Local slot of each expert on ``rank``, -1 where it has none, int32 ``[L, E]``."""
        return np.stack([expert_map(layer_RS[rank], self.experts) for layer_RS in self.phy2log_LRS])

    def default_log2phy(self) -> Int32:
        """Tables by the engines' fixed rule (see ``default_log2phy``), int32 ``[R, L, E]``."""
        tables = [default_log2phy(layer_RS, self.experts) for layer_RS in self.phy2log_LRS]
        return np.ascontiguousarray(np.stack(tables, axis=1))

    def with_layer(self, layer: int, phy2log_RS: Int32) -> Placement:
        """This placement with one layer replaced; only that one is checked, for ranks switch between two steps."""
        replaced_RS = np.asarray(phy2log_RS, dtype=np.int32)
        if replaced_RS.shape != (self.ranks, self.slots):
            raise PlacementError(
                f"layer {layer}: expected the shape {[self.ranks, self.slots]}, got {list(replaced_RS.shape)}"
            )
        check_layer(replaced_RS, self.experts, where=f"layer {layer}")
        changed = self.phy2log_LRS.copy()
        changed[layer] = replaced_RS
        changed.setflags(write=False)
        placement = object.__new__(Placement)
        object.__setattr__(placement, "phy2log_LRS", changed)
        object.__setattr__(placement, "experts", self.experts)
        return placement

    def digest(self) -> int:
        """A 63-bit fingerprint: equal on two hosts if, and but for chance only if, the placements are equal."""
        return combine_digests(
            self.experts, (layer_digest(layer, row) for layer, row in enumerate(self.phy2log_LRS))
        )


def check_shape(experts: int, ranks: int, slots: int) -> None:
    """Raise ``PlacementError`` where no placement of this shape can exist."""
    if min(experts, ranks, slots) < 1:
        raise PlacementError(f"experts, ranks and slots must be positive, got {experts}, {ranks} and {slots}")
    if ranks * slots < experts:
        raise PlacementError(
            f"{ranks} ranks x {slots} slots = {ranks * slots} slots cannot hold {experts} experts; "
            f"use at least {-(-experts // ranks)} slots a rank"
        )
    if slots > experts:
        raise PlacementError(
            f"{slots} slots a rank must hold one of only {experts} experts twice; use at most {experts} slots a rank"
        )


def check_layer(phy2log_RS: Int32, experts: int, where: str = "layer") -> None:
    """Raise ``PlacementError`` unless every expert is placed and none stands twice on a rank."""
    if phy2log_RS.min() < 0 or phy2log_RS.max() >= experts:
        rank, slot = np.argwhere((phy2log_RS < 0) | (phy2log_RS >= experts))[0]
        found = int(phy2log_RS[rank, slot])
        raise PlacementError(
            f"{where}: rank {rank} slot {slot} names expert {found}, not one of 0..{experts - 1}"
        )
    missing = np.flatnonzero(np.bincount(phy2log_RS.ravel(), minlength=experts) == 0)
    if missing.size:
        raise PlacementError(f"{where}: expert {missing[0]} stands in no slot ({missing.size} such experts)")
    in_order = np.sort(phy2log_RS, axis=1)
    twice = np.argwhere(in_order[:, 1:] == in_order[:, :-1])
    if twice.size:
        rank, slot = twice[0]
        raise PlacementError(f"{where}: expert {in_order[rank, slot]} stands twice on rank {rank}")


def check_log2phy(log2phy_E: Int32, phy2log_RS: Int32, where: str = "log2phy") -> None:
    """Raise ``PlacementError`` unless each expert's entry in one rank's table is a slot that holds it."""
    flat = phy2log_RS.ravel()
    if log2phy_E.ndim != 1:
        raise PlacementError(f"{where}: a table has the shape [experts], got {list(log2phy_E.shape)}")
    experts = np.arange(log2phy_E.shape[0])
    outside = (log2phy_E < 0) | (log2phy_E >= flat.size)
    wrong = outside | (flat[np.where(outside, 0, log2phy_E)] != experts)
    if wrong.any():
        expert = int(np.flatnonzero(wrong)[0])
        slot = int(log2phy_E[expert])
        raise PlacementError(f"{where}: expert {expert} points to slot {slot}, which does not hold it")


def replica_counts(phy2log_RS: Int32, experts: int) -> Int32:
    """Copies of each expert in one layer, int32 ``[E]``."""
    return np.bincount(phy2log_RS.ravel(), minlength=experts).astype(np.int32)


def expert_map(phy2log_S: Int32, experts: int) -> Int32:
    """Local slot of each expert on one rank of one layer, -1 where it has none, int32 ``[E]``."""
    local_E = np.full(experts, -1, dtype=np.int32)
    local_E[phy2log_S] = np.arange(phy2log_S.shape[0], dtype=np.int32)
    return local_E


def default_log2phy(phy2log_RS: Int32, experts: int) -> Int32:
    """The engines' fixed rule: source rank ``r`` uses replica ``r % k`` of an expert with ``k`` replicas.

    Returns int32 ``[R, E]``, one layer's table for every source rank; replicas count in order of physical id.
    """
    ranks = phy2log_RS.shape[0]
    flat = phy2log_RS.ravel()
    by_expert = np.argsort(flat, kind="stable").astype(np.int32)
    counts_E = replica_counts(phy2log_RS, experts)
    first_E = np.concatenate(([0], np.cumsum(counts_E)[:-1]))
    chosen_RE = np.tile(by_expert[first_E], (ranks, 1))
    # Divisions are dear, and most experts have one replica.
    several = np.flatnonzero(counts_E > 1)
    rank_R1 = np.arange(ranks, dtype=np.int32)[:, None]
    chosen_RE[:, several] = by_expert[first_E[several] + rank_R1 % counts_E[several]]
    return chosen_RE


def layer_digest(layer: int, phy2log_RS: Int32) -> int:
    """63-bit fingerprint of one layer's slots."""
    return array_digest(np.ascontiguousarray(phy2log_RS, dtype="<i4"), salt=f"layer {layer}")


def combine_digests(experts: int, layer_digests: Iterable[int]) -> int:
    """Placement fingerprint from its layers' fingerprints, so that one switched layer costs one layer's hashing."""
    return array_digest(np.fromiter(layer_digests, dtype="<i8"), salt=f"placement of {experts}")


def array_digest(array: npt.NDArray[np.generic], salt: str = "") -> int:
    """63-bit fingerprint of an array's shape, type and bytes."""
    head = f"{salt} {array.dtype.str} {array.shape} ".encode()
    return (
        int.from_bytes(hashlib.blake2b(head + array.tobytes(), digest_size=8).digest(), "little")
        & _DIGEST_MASK
    )
