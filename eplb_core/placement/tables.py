"""Validation of layers and tables, and the default tables of a layer.

A table (``log2phy``) gives, for each expert, the slot to which a source rank sends that expert's tokens. A dealing
table has several entries per expert, used in turn: the i-th token that a rank sends to an expert in a step goes to
entry ``i % D``. A slot that is listed twice gets twice the tokens, so a table with D entries divides an expert's tokens
in multiples of 1/D. D = 1 is vLLM-Ascend's table: one replica per source rank. In arrays, files and messages, tables
with D = 1 have no entries axis: ``log2phy_RLE`` is ``[R, L, E]``, and dealing tables are ``[R, L, E, D]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
"""An int32 array. The suffix of a variable's name gives its dimensions."""
MAX_ENTRIES = 64
"""Maximum number of entries per expert in a dealing table. Shares finer than 1/64 are lost in a step's noise."""


class PlacementError(ValueError):
    """A placement, table or list of moves is invalid. The message names the layer or slot and the reason."""


def check_shape(experts: int, ranks: int, slots: int) -> None:
    """Raise ``PlacementError`` if no placement can have this shape."""
    if min(experts, ranks, slots) < 1:
        raise PlacementError(f"experts, ranks and slots must be positive, got {experts}, {ranks} and {slots}")
    if ranks * slots < experts:
        raise PlacementError(
            f"{ranks} ranks x {slots} slots = {ranks * slots} slots cannot hold {experts} experts; "
            f"use at least {-(-experts // ranks)} slots per rank"
        )
    if slots > experts:
        raise PlacementError(
            f"{slots} slots per rank exceed the {experts} experts, so a rank would hold an expert twice; "
            f"use at most {experts} slots per rank"
        )


def check_layer(phy2log_RS: Int32, experts: int, where: str = "layer") -> None:
    """Raise ``PlacementError`` unless each expert has a slot and no rank has two slots with the same expert.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, the logical expert in each slot.
    experts
        E, logical experts per layer.
    where
        Name of the layer in error messages.

    Examples
    --------
    >>> check_layer(np.array([[0, 1], [2, 0]]), experts=3)
    >>> check_layer(np.array([[0, 1], [2, 2]]), experts=3, where="layer 7")
    Traceback (most recent call last):
    eplb_core.placement.tables.PlacementError: layer 7: expert 2 appears twice on rank 1
    """
    if phy2log_RS.min() < 0 or phy2log_RS.max() >= experts:
        rank, slot = np.argwhere((phy2log_RS < 0) | (phy2log_RS >= experts))[0]
        expert = int(phy2log_RS[rank, slot])
        raise PlacementError(
            f"{where}: rank {rank} slot {slot} has expert {expert}; expected 0..{experts - 1}"
        )
    missing = np.flatnonzero(np.bincount(phy2log_RS.ravel(), minlength=experts) == 0)
    if missing.size:
        raise PlacementError(f"{where}: expert {missing[0]} has no slot ({missing.size} such experts)")
    sorted_RS = np.sort(phy2log_RS, axis=1)
    duplicates = np.argwhere(sorted_RS[:, 1:] == sorted_RS[:, :-1])
    if duplicates.size:
        rank, slot = duplicates[0]
        raise PlacementError(f"{where}: expert {sorted_RS[rank, slot]} appears twice on rank {rank}")


def check_log2phy(log2phy: Int32, phy2log_RS: Int32, where: str = "log2phy", *, deals: bool = False) -> None:
    """Raise ``PlacementError`` unless every entry of a layer's tables points to a slot that holds its expert.

    Parameters
    ----------
    log2phy
        Integers ``[E]``, the table of one source rank, or ``[G, E]``, the tables of G source ranks.
    phy2log_RS
        int32 ``[R, S]``, a layer that has passed ``check_layer``.
    where
        Name of the tables in error messages. With several source ranks, the rank is added to it.
    deals
        True if the tables have a trailing entries axis.
    """
    axes = log2phy.ndim - deals
    if axes not in (1, 2) or (deals and not log2phy.shape[-1]):
        expected = "[experts, entries]" if deals else "[experts]"
        raise PlacementError(f"{where}: expected a table of shape {expected}, got {list(log2phy.shape)}")
    experts = log2phy.shape[axes - 1]
    table_GED = log2phy.reshape(-1, experts, log2phy.shape[-1] if deals else 1)
    expert_P = phy2log_RS.ravel()
    wrong_GED = expert_P.take(table_GED, mode="clip") != np.arange(experts, dtype=expert_P.dtype)[:, None]
    if table_GED.size and (table_GED.min() < 0 or table_GED.max() >= expert_P.size):
        wrong_GED |= (table_GED < 0) | (table_GED >= expert_P.size)
    if wrong_GED.any():
        table, expert, entry = (int(index) for index in np.argwhere(wrong_GED)[0])
        name = f"{where}, rank {table}" if axes == 2 else where
        slot = int(table_GED[table, expert, entry])
        raise PlacementError(f"{name}: expert {expert} points to slot {slot}, which does not hold it")


def check_tables_follow(before: Int32, table: Int32, phy2log_RS: Int32, layer: int) -> None:
    """Raise ``PlacementError`` unless new tables of a layer fit its placement and the shape of the current tables.

    Parameters
    ----------
    before
        int32 ``[R, E]`` or ``[R, E, D]``, the current tables.
    table
        New tables, of the same shape.
    phy2log_RS
        int32 ``[R, S]``, the new placement of the layer.
    layer
        Index of the layer, for error messages.
    """
    if table.shape != before.shape:
        raise PlacementError(
            f"log2phy of layer {layer}: expected tables of shape {list(before.shape)}, got {list(table.shape)}"
        )
    check_log2phy(table, phy2log_RS, f"log2phy of layer {layer}", deals=table.ndim == 3)


def expert_map(phy2log_S: Int32, experts: int) -> Int32:
    """Return the local slot of each expert on one rank in one layer, int32 ``[E]``; -1 if the rank does not have it."""
    local_E = np.full(experts, -1, dtype=np.int32)
    local_E[phy2log_S] = np.arange(phy2log_S.shape[0], dtype=np.int32)
    return local_E


def default_log2phy(phy2log_RS: Int32, experts: int, width: int = 1) -> Int32:
    """Return one layer's default tables: source rank ``r`` uses replica ``r % k`` of an expert's k replicas.

    This is the engines' fixed rule. Replicas are numbered in the order of their physical ids.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, the logical expert in each slot.
    experts
        E, logical experts per layer.
    width
        D, entries per expert. Each rank deals tokens to the replicas in turn, starting from replica ``r % k``.

    Returns
    -------
    Int32
        int32 ``[R, E]``, or ``[R, E, D]`` if ``width`` is greater than 1.

    Examples
    --------
    Expert 0 is in slots 0 and 3. Rank 0 uses slot 0 and rank 1 uses slot 3:

    >>> phy2log_RS = np.array([[0, 1], [2, 0]])
    >>> default_log2phy(phy2log_RS, experts=3)
    array([[0, 1, 2],
           [3, 1, 2]], dtype=int32)

    With two entries per expert, each rank deals expert 0's tokens to both slots:

    >>> default_log2phy(phy2log_RS, experts=3, width=2)[:, 0]
    array([[0, 3],
           [3, 0]], dtype=int32)
    """
    expert_P = phy2log_RS.ravel()
    by_expert = np.argsort(expert_P, kind="stable").astype(np.int32)
    counts_E1 = np.bincount(expert_P, minlength=experts)[:, None]
    first_E1 = counts_E1.cumsum(axis=0) - counts_E1
    turn_R1D = np.add.outer(np.arange(len(phy2log_RS)), np.arange(width))[:, None]
    return without_single_entries(np.ascontiguousarray(by_expert[first_E1 + turn_R1D % counts_E1]))


def with_entries(log2phy: Int32, axes: int) -> Int32:
    """Return a view of the tables with a trailing entries axis, even if D is 1.

    Parameters
    ----------
    log2phy
        Tables with or without that axis.
    axes
        Number of axes, not counting the entries axis.
    """
    return log2phy[..., np.newaxis] if log2phy.ndim == axes else log2phy


def without_single_entries(log2phy: Int32) -> Int32:
    """Return tables ``[..., D]``, dropping the entries axis if D is 1."""
    return log2phy[..., 0] if log2phy.shape[-1] == 1 else log2phy


def dealt_to(tokens: npt.NDArray[np.integer[Any]], entry: int, width: int) -> npt.NDArray[np.integer[Any]]:
    """Return the number of tokens that go to one entry of a dealing table.

    Parameters
    ----------
    tokens
        Number of tokens that a rank sends to an expert in a step; an array of any shape.
    entry
        Index of the entry, counted from 0.
    width
        D, entries per expert.

    Examples
    --------
    >>> [int(dealt_to(np.array(7), entry, width=3)) for entry in range(3)]
    [3, 2, 2]
    """
    return (tokens.astype(np.int64) + (width - 1 - entry)) // width


def drawn_by_row(
    tokens: npt.NDArray[np.integer[Any]],
    entries: npt.NDArray[np.integer[Any]],
    seed: int | tuple[int, ...],
) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each dealing-table entry if the host picks entries by the token's row.

    The rows of an expert's tokens are unknown and drawn at random, as in ``solver.whole_tokens``. Draws are slow, so
    none is made for an expert whose entries are all equal. All its tokens go to the first entry.

    Parameters
    ----------
    tokens
        Number of tokens that a rank sends to an expert in a step; an array of any shape.
    entries
        ``[..., D]``, the tables' entries.
    seed
        Seed of the draw. The same arguments give the same result.

    Returns
    -------
    NDArray[np.int64]
        ``[..., D]``, the tokens of each entry.

    Examples
    --------
    >>> drawn = drawn_by_row(np.array([7, 7]), np.array([[4, 4, 4], [4, 8, 4]]), seed=1)
    >>> drawn[0].tolist(), int(drawn[1].sum())
    ([7, 0, 0], 7)
    """
    width = entries.shape[-1]
    drawn = np.zeros(entries.shape, dtype=np.int64)
    drawn[..., 0] = tokens
    differs = (entries[..., 1:] != entries[..., :1]).any(axis=-1)
    drawn[differs] = np.random.default_rng(seed).multinomial(tokens[differs], np.full(width, 1 / width))
    return drawn
