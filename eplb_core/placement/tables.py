"""Rules for layers and tables that can be served, and the tables that follow from a layer alone.

A dealing table is a log2phy with several entries for each expert, which a rank's tokens go to in turn: the i-th token
that a rank sends to an expert in a step goes to entry ``i % D``. An entry that is there twice gets twice the tokens, so
a table of D entries expresses any share in steps of 1/D. D = 1 is the table that vLLM-Ascend knows: one replica for
each source rank. Such tables have no axis for their entries, here and in files and messages: ``log2phy_RLE`` is
``[R, L, E]``, and ``[R, L, E, D]`` where ranks deal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
"""An int32 array; the variable's name carries its dimensions."""
MAX_ENTRIES = 64
"""Entries of a dealing table for one expert at most; finer shares than a 64th are lost in the noise of any step."""


class PlacementError(ValueError):
    """A placement, table or move list that no set of ranks could serve; the message says where and why."""


def check_shape(experts: int, ranks: int, slots: int) -> None:
    """Raise ``PlacementError`` where no placement of this shape can exist."""
    if min(experts, ranks, slots) < 1:
        raise PlacementError(f"experts, ranks and slots must be positive, got {experts}, {ranks} and {slots}")
    if ranks * slots < experts:
        raise PlacementError(
            f"{ranks} ranks x {slots} slots = {ranks * slots} slots cannot hold {experts} experts; "
            f"use at least {-(-experts // ranks)} slots per rank"
        )
    if slots > experts:
        raise PlacementError(
            f"{slots} slots per rank must hold one of only {experts} experts twice; "
            f"use at most {experts} slots per rank"
        )


def check_layer(phy2log_RS: Int32, experts: int, where: str = "layer") -> None:
    """Raise ``PlacementError`` unless every expert is placed and none is twice on a rank."""
    if phy2log_RS.min() < 0 or phy2log_RS.max() >= experts:
        rank, slot = np.argwhere((phy2log_RS < 0) | (phy2log_RS >= experts))[0]
        found = int(phy2log_RS[rank, slot])
        raise PlacementError(
            f"{where}: rank {rank} slot {slot} names expert {found}, not one of 0..{experts - 1}"
        )
    missing = np.flatnonzero(np.bincount(phy2log_RS.ravel(), minlength=experts) == 0)
    if missing.size:
        raise PlacementError(f"{where}: expert {missing[0]} is in no slot ({missing.size} such experts)")
    in_order = np.sort(phy2log_RS, axis=1)
    twice = np.argwhere(in_order[:, 1:] == in_order[:, :-1])
    if twice.size:
        rank, slot = twice[0]
        raise PlacementError(f"{where}: expert {in_order[rank, slot]} is twice on rank {rank}")


def check_log2phy(log2phy: Int32, phy2log_RS: Int32, where: str = "log2phy", *, deals: bool = False) -> None:
    """Raise ``PlacementError`` unless every entry of one layer's tables is a slot that holds its expert.

    Parameters
    ----------
    log2phy
        Integers ``[E]``, the table of one source, or ``[G, E]``, those of G sources.
    phy2log_RS
        int32 ``[R, S]``, a layer that ``check_layer`` has passed.
    where
        What the message calls the layer; of several sources it names the rank.
    deals
        Whether tables have an axis of entries behind the others.
    """
    axes = log2phy.ndim - deals
    if axes not in (1, 2) or (deals and not log2phy.shape[-1]):
        expected = "[experts, entries]" if deals else "[experts]"
        raise PlacementError(f"{where}: a table has the shape {expected}, got {list(log2phy.shape)}")
    experts = log2phy.shape[axes - 1]
    table_GED = log2phy.reshape(-1, experts, log2phy.shape[-1] if deals else 1)
    expert_P = phy2log_RS.ravel()
    wrong_GED = expert_P.take(table_GED, mode="clip") != np.arange(experts, dtype=expert_P.dtype)[:, None]
    if table_GED.size and (table_GED.min() < 0 or table_GED.max() >= expert_P.size):
        wrong_GED |= (table_GED < 0) | (table_GED >= expert_P.size)
    if wrong_GED.any():
        table, expert, entry = (int(index) for index in np.argwhere(wrong_GED)[0])
        named = f"{where}, rank {table}" if axes == 2 else where
        slot = int(table_GED[table, expert, entry])
        raise PlacementError(f"{named}: expert {expert} points to slot {slot}, which does not hold it")


def check_tables_follow(before: Int32, table: Int32, phy2log_RS: Int32, layer: int) -> None:
    """Raise ``PlacementError`` unless tables ``[R, E]`` or ``[R, E, D]`` of a layer can replace those ``before``."""
    if table.shape != before.shape:
        raise PlacementError(
            f"log2phy of layer {layer} has the shape {list(before.shape)}, got {list(table.shape)}"
        )
    check_log2phy(table, phy2log_RS, f"log2phy of layer {layer}", deals=table.ndim == 3)


def expert_map(phy2log_S: Int32, experts: int) -> Int32:
    """Local slot of each expert on one rank of one layer, -1 where it has none, int32 ``[E]``."""
    local_E = np.full(experts, -1, dtype=np.int32)
    local_E[phy2log_S] = np.arange(phy2log_S.shape[0], dtype=np.int32)
    return local_E


def default_log2phy(phy2log_RS: Int32, experts: int, width: int = 1) -> Int32:
    """One layer's tables by the engines' fixed rule: rank ``r`` uses replica ``r % k`` of an expert with ``k``.

    Returns int32 ``[R, E]``; where ``width`` is more than 1 ``[R, E, D]``, by which each rank deals round the replicas
    from that one on. Replicas count in order of physical id.
    """
    expert_P = phy2log_RS.ravel()
    by_expert = np.argsort(expert_P, kind="stable").astype(np.int32)
    counts_E1 = np.bincount(expert_P, minlength=experts)[:, None]
    first_E1 = counts_E1.cumsum(axis=0) - counts_E1
    turn_R1D = np.add.outer(np.arange(len(phy2log_RS)), np.arange(width))[:, None]
    return without_single_entries(np.ascontiguousarray(by_expert[first_E1 + turn_R1D % counts_E1]))


def with_entries(log2phy: Int32, axes: int) -> Int32:
    """A view of tables of any width with an axis of entries behind their ``axes`` others."""
    return log2phy[..., np.newaxis] if log2phy.ndim == axes else log2phy


def without_single_entries(log2phy: Int32) -> Int32:
    """Tables whose last axis is of entries, without it where it has one: as D = 1 is written."""
    return log2phy[..., 0] if log2phy.shape[-1] == 1 else log2phy


def dealt_to(tokens: npt.NDArray[np.integer[Any]], entry: int, width: int) -> npt.NDArray[np.integer[Any]]:
    """Tokens, of so many, that go to one of ``width`` entries, dealt from the first on."""
    return (tokens.astype(np.int64) + (width - 1 - entry)) // width
