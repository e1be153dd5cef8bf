"""Dealing tables: log2phy with several entries for each expert, which a rank's tokens go to in turn.

The i-th token that a rank sends to an expert in a step goes to entry ``i % D``. An entry that is there twice gets twice
the tokens, so a table of D entries expresses any share in steps of 1/D. D = 1 is the table that vLLM-Ascend knows: one
replica for each source rank. Such tables have no axis for their entries, here and in files and messages:
``log2phy_RLE`` is ``[R, L, E]``, and ``[R, L, E, D]`` where ranks deal.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.placement.placement import Placement, replica_counts
from eplb_service.placement.validity import Int32, PlacementError

MOST_ENTRIES = 64
"""Of a dealing table for one expert; finer shares than a 64th are lost in the noise of any step."""
Integers: TypeAlias = npt.NDArray[np.integer[Any]]
"""Counts of tokens, whatever the shape."""


def dealing_width(log2phy: Int32, axes: int) -> int:
    """D of tables that have ``axes`` axes before their entries."""
    return 1 if log2phy.ndim == axes else int(log2phy.shape[axes])


def with_entries(log2phy: Int32, axes: int) -> Int32:
    """A view of tables of any width with an axis of entries behind their ``axes`` others."""
    return log2phy[..., np.newaxis] if log2phy.ndim == axes else log2phy


def without_single_entries(log2phy: Int32) -> Int32:
    """Tables whose last axis is of entries, without it where it has one: as D = 1 is written."""
    return log2phy[..., 0] if log2phy.shape[-1] == 1 else log2phy


def dealt_to(tokens: Integers, entry: int, width: int) -> Integers:
    """Of so many tokens those that go to one of ``width`` entries, dealt from the first on."""
    return (tokens.astype(np.int64) + (width - 1 - entry)) // width


def repeated_entries(log2phy: Int32, axes: int, width: int) -> Int32:
    """The same tables with ``width`` entries: a multiple of theirs, which they go through several times.

    Raises
    ------
    PlacementError
        Where it is no multiple.
    """
    table = with_entries(log2phy, axes)
    if width % table.shape[-1]:
        raise PlacementError(f"log2phy of {table.shape[-1]} entries cannot be repeated to {width}")
    repeated = np.tile(table, (1,) * axes + (width // table.shape[-1],))
    return without_single_entries(repeated)


def dealt_log2phy(phy2log_RS: Int32, experts: int, width: int) -> Int32:
    """Each source rank deals round an expert's replicas, beginning at replica ``rank % k``; int32 ``[R, E, D]``.

    With ``width`` 1 it is the engines' fixed rule, see ``default_log2phy``. Replicas count in order of physical id.
    """
    ranks = phy2log_RS.shape[0]
    flat = phy2log_RS.ravel()
    by_expert = np.argsort(flat, kind="stable").astype(np.int32)
    counts_E1 = replica_counts(phy2log_RS, experts)[:, None]
    first_E1 = counts_E1.cumsum(axis=0) - counts_E1
    turn_R1D = np.add.outer(np.arange(ranks), np.arange(width))[:, None]
    return np.ascontiguousarray(by_expert[first_E1 + turn_R1D % counts_E1])


def even_log2phy(placement: Placement, width: int) -> Int32:
    """``dealt_log2phy`` of all layers, int32 ``[R, L, E, D]``, or ``[R, L, E]`` for one entry."""
    tables = [dealt_log2phy(layer_RS, placement.experts, width) for layer_RS in placement.phy2log_LRS]
    return np.ascontiguousarray(without_single_entries(np.stack(tables, axis=1)))
