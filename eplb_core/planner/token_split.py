"""Split of each expert's tokens over the slots that hold its replicas, for all kinds of hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, Int32, Placement, with_entries
from eplb_core.planner.dealing import entry_parts
from eplb_core.planner.settings import EVEN
from eplb_core.solver.whole_tokens import HostSplit
from eplb_core.solver.window import shares_of_slots

Heat = npt.NDArray[np.floating] | npt.NDArray[np.integer]
"""Tokens of each expert in each step, ``[T, L, E]``."""


def source_shares(source_RLE: Float64 | None, ranks: int, layers: int, experts: int) -> Float64:
    """Return each source rank's share of each expert's tokens, summing to 1 over the ranks, float64 ``[R, L, E]``.

    The shares are uniform if ``source_RLE`` is ``None``, and for experts without tokens.
    """
    shares_RLE: Float64 = np.full((ranks, layers, experts), 1.0 / ranks)
    if source_RLE is not None:
        total_LE = source_RLE.sum(axis=0)
        np.divide(source_RLE, total_LE, out=shares_RLE, where=total_LE > 0)
    return shares_RLE


def split_shares(
    heat_TLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
) -> Float64:
    """Return, for each slot, the expected share of its expert's tokens that it receives.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step. They matter only if the host deals, because an entry's share
        then depends on the number of tokens.
    placement
        Current placement.
    log2phy_RLE
        int32 ``[R, L, E]``, current table of each source rank; ``[R, L, E, D]`` if the ranks deal.
    source_RLE
        float64 ``[R, L, E]``, tokens by source rank. Only each expert's distribution over the ranks is used. ``None``
        for a uniform distribution.
    split
        One of ``settings.SPLITS``.

    Returns
    -------
    Float64
        float64 ``[L, R*S]``.

    Examples
    --------
    Three experts are placed on two ranks with two slots each. Expert 0 has a replica on each rank:

    >>> placement = Placement(np.array([[[0, 1], [0, 2]]], dtype=np.int32), experts=3)
    >>> tables_RLE = placement.default_log2phy()
    >>> heat_TLE = np.array([[[40, 5, 5]]])
    >>> split_shares(heat_TLE, placement, tables_RLE, None, "even")
    array([[0.5, 1. , 0.5, 1. ]])

    With tables, each rank sends its tokens to the replica given by its table. If rank 0 is the source of three quarters
    of expert 0's tokens, the replica on rank 0 receives three quarters as well:

    >>> source_RLE = np.array([[[30.0, 5.0, 0.0]], [[10.0, 0.0, 5.0]]])
    >>> split_shares(heat_TLE, placement, tables_RLE, source_RLE, "tables")
    array([[0.75, 1.  , 0.25, 1.  ]])
    """
    if split == EVEN:
        expert_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
        share_LP: Float64 = 1.0 / np.take_along_axis(placement.replicas(), expert_LP, axis=1)
        return share_LP
    if with_entries(log2phy_RLE, 3).shape[3] > 1:
        return _dealt_shares(heat_TLE, placement, log2phy_RLE, source_RLE)
    return _table_shares(placement, log2phy_RLE, source_RLE)


def _dealt_shares(
    heat_TLE: Heat, placement: Placement, log2phy_RLED: Int32, source_RLE: Float64 | None
) -> Float64:
    """Return ``split_shares`` for ranks that deal their tokens to several entries per expert."""
    sources = log2phy_RLED.shape[0]
    width = log2phy_RLED.shape[3]
    layers, ranks, slots = placement.phy2log_LRS.shape
    shares_RLE = source_shares(source_RLE, sources, layers, placement.experts)
    entry_RLED = shares_RLE[..., None] * entry_parts(shares_RLE * heat_TLE.mean(axis=0), width)
    share_LP = np.empty((layers, ranks * slots))
    for layer in range(layers):
        slot_X = log2phy_RLED[:, layer].ravel()
        share_LP[layer] = np.bincount(slot_X, entry_RLED[:, layer].ravel(), minlength=ranks * slots)
    return share_LP


def _table_shares(placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None) -> Float64:
    """Return ``split_shares`` for ranks whose tables have one entry per expert."""
    layers, ranks, slots = placement.phy2log_LRS.shape
    tables_RLE = np.ascontiguousarray(log2phy_RLE)
    # If the sources are unknown, all layers share one row of ones.
    tokens_RLE = np.ones((log2phy_RLE.shape[0], 1, placement.experts)) if source_RLE is None else source_RLE
    tokens_RLE = np.ascontiguousarray(tokens_RLE)
    share_LP = np.empty((layers, ranks * slots))
    for layer, phy2log_RS in enumerate(placement.phy2log_LRS.copy()):
        row = 0 if source_RLE is None else layer
        share_LP[layer] = shares_of_slots(phy2log_RS, tables_RLE, layer, tokens_RLE, row)
    return share_LP


def host_split(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    layer_K: npt.NDArray[np.int64] | None = None,
) -> HostSplit:
    """Return the split in the form that the whole-token kernel expects.

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split
        As for ``split_shares``. All except the heat contain only the K selected layers.
    layer_K
        int64 ``[K]``, layers of ``heat_TLE`` to select; all by default.
    """
    layers = placement.layers
    experts = placement.experts
    layer_K = np.arange(layers) if layer_K is None else layer_K
    deals = split != EVEN and with_entries(log2phy_RLE, 3).shape[3] > 1
    # Only dealt shares depend on the number of tokens.
    heat_TKE = heat_TLE[:, layer_K] if deals else heat_TLE[:0, layer_K]
    share_KP = split_shares(heat_TKE, placement, log2phy_RLE, source_RLE, split)
    if not deals:
        no_tables = np.zeros((layers, 0, experts, 1), dtype=np.int32)
        return HostSplit(share_KP, no_tables, np.zeros((layers, 0, experts)), np.ones((layers, experts)))
    source_KRE = source_shares(source_RLE, len(log2phy_RLE), layers, experts).transpose(1, 0, 2)
    table_KRED = log2phy_RLE.transpose(1, 0, 2, 3)
    return HostSplit(
        share_KP,
        np.ascontiguousarray(table_KRED, dtype=np.int32),
        np.ascontiguousarray(source_KRE),
        _dealt_spread(table_KRED, source_KRE, placement, share_KP),
    )


def _dealt_spread(table_KRED: Int32, source_KRE: Float64, placement: Placement, share_KP: Float64) -> Float64:
    """Return the variance of dealt token counts relative to the multinomial variance, float64 ``[K, E]``.

    The result holds for many tokens. A source that deals ``n`` tokens to its entries sends a fixed fraction of them to
    each slot. The number of tokens in a slot therefore varies only because the number of tokens per source varies.
    """
    width = table_KRED.shape[3]
    # Number of pairs of entries that refer to the same slot. Divided by width², it is the sum, over a source's slots,
    # of the squared fraction of the source's tokens that the slot receives.
    pairs_KRE = np.zeros(table_KRED.shape[:3])
    for entry in range(width):
        pairs_KRE += (table_KRED == table_KRED[..., entry, None]).sum(axis=3)
    by_source_KE = (source_KRE * pairs_KRE / width**2).sum(axis=1)
    squares_KE = np.zeros_like(by_source_KE)
    expert_KP = placement.phy2log_LRS.reshape(placement.layers, -1)
    for layer in range(placement.layers):
        np.add.at(squares_KE[layer], expert_KP[layer], share_KP[layer] ** 2)
    spread_KE: Float64 = np.ones_like(by_source_KE)
    np.divide(by_source_KE - squares_KE, 1.0 - squares_KE, out=spread_KE, where=squares_KE < 1.0 - 1e-9)
    clipped_KE: Float64 = np.clip(spread_KE, 0.0, 1.0)
    return clipped_KE


def as_kernel_heat(heat_TLE: Heat) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Return the heat as a contiguous array of a type that the kernels accept.

    The number of types is limited because each kernel is compiled once per type, on first use.
    """
    accepted = heat_TLE.dtype in (np.int32, np.int64, np.float64)
    kernel_TLE: npt.NDArray[Any] = heat_TLE if accepted else heat_TLE.astype(np.float64)
    return np.ascontiguousarray(kernel_TLE)
