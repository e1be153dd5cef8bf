"""Rank loads: what each rank receives under a placement and its tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Float64, Int32, Placement
from eplb_service.solver.window import loads_of_ranks


def source_shares(source_RLE: Float64 | None, ranks: int, layers: int, experts: int) -> Float64:
    """Each expert's split over the source ranks, summing to 1, float64 ``[R, L, E]``.

    Uniform where it is unknown (``source_RLE`` is ``None``, or an expert got no tokens).
    """
    shares_RLE: Float64 = np.full((ranks, layers, experts), 1.0 / ranks)
    if source_RLE is not None:
        total_LE = source_RLE.sum(axis=0)
        np.divide(source_RLE, total_LE, out=shares_RLE, where=total_LE > 0)
    return shares_RLE


def slot_shares(phy2log_LRS: Int32, log2phy_RLE: Int32, shares_RLE: Float64 | None) -> Float64:
    """The share of its expert's tokens that each slot receives, float64 ``[L, R*S]``.

    ``shares_RLE`` as ``source_shares`` gives them; ``None`` where all sources send alike.
    """
    layers, ranks, slots = phy2log_LRS.shape
    share_LP: Float64 = np.empty((layers, ranks * slots))
    for layer in range(layers):
        chosen = log2phy_RLE[:, layer].ravel()
        weights = None if shares_RLE is None else shares_RLE[:, layer].ravel()
        share_LP[layer] = np.bincount(chosen, weights, minlength=ranks * slots)
    if shares_RLE is None:
        share_LP /= log2phy_RLE.shape[0]
    return share_LP


def rank_loads(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None = None,
) -> Float64:
    """Tokens that each rank receives through the actual tables, float64 ``[N, L, R]``.

    An expert's tokens split over the source ranks as in ``source_RLE`` (float64 ``[R, L, E]``, only each expert's
    split is used; uniform where unknown), and each part goes to the replica that its rank's table names.
    """
    shares_RLE = None
    if source_RLE is not None:
        shares_RLE = source_shares(source_RLE, log2phy_RLE.shape[0], placement.layers, placement.experts)
    share_LP = slot_shares(placement.phy2log_LRS, log2phy_RLE, shares_RLE)
    return loads_of_ranks(_wide(heat_NLE), placement.phy2log_LRS.copy(), share_LP)


def split_loads(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
) -> Float64:
    """``rank_loads`` on a host that splits tokens as ``split``, one of ``settings.SPLITS``."""
    if split != "even":
        return rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE)
    replicas_LE = placement.replicas()
    expert_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    share_LP = 1.0 / np.take_along_axis(replicas_LE, expert_LP, axis=1)
    return loads_of_ranks(_wide(heat_NLE), placement.phy2log_LRS.copy(), share_LP)


def _wide(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Heat in a type that the kernels take; each is compiled where it first comes up."""
    kinds = (np.int32, np.int64, np.float64)
    wide_NLE = heat_NLE if heat_NLE.dtype in kinds else heat_NLE.astype(np.float64)
    return np.ascontiguousarray(wide_NLE)
