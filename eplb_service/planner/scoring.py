"""Rank loads: what each rank receives under a placement and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve
from eplb_service.placement import Float64, Int32, Placement, dealing_width, mean_par, peak_par
from eplb_service.planner.dealing import entry_parts
from eplb_service.planner.settings import EVEN, STEP
from eplb_service.solver.stepwise.slots import slots_by_step
from eplb_service.solver.stepwise.split import loads_by_step
from eplb_service.solver.time.evaluation import Curve, slowest_in_steps
from eplb_service.solver.window import loads_of_ranks, served_window

_STEPS_AT_A_TIME = 32
"""Steps whose tokens are held by slot."""


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

    ``shares_RLE`` as ``source_shares`` gives them, or ``[R, L, E, D]`` by entry where tables deal; ``None`` where all
    sources send alike.
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


def split_shares(
    heat_TLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
) -> Float64:
    """The share of its expert's tokens that each slot receives on a host that splits tokens as ``split``.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each step: what an entry of a dealing table gets of them depends on their number.
    placement, log2phy_RLE
        What serves: the placement and int32 ``[R, L, E]`` the table of each source rank; ``[R, L, E, D]`` where they
        deal.
    source_RLE
        float64 ``[R, L, E]``, of which each expert's split over the source ranks is used; uniform where unknown.
    split
        One of ``settings.SPLITS``.

    Returns
    -------
    Float64
        float64 ``[L, R*S]``.
    """
    if split == EVEN:
        expert_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
        share_LP: Float64 = 1.0 / np.take_along_axis(placement.replicas(), expert_LP, axis=1)
        return share_LP
    shares_RLE = None
    width = dealing_width(log2phy_RLE, 3)
    if source_RLE is not None or width > 1:
        shares_RLE = source_shares(source_RLE, log2phy_RLE.shape[0], placement.layers, placement.experts)
    if shares_RLE is not None and width > 1:
        parts_RLED = entry_parts(shares_RLE * heat_TLE.mean(axis=0), width)
        shares_RLE = shares_RLE[..., None] * parts_RLED
    return slot_shares(placement.phy2log_LRS, log2phy_RLE, shares_RLE)


def rank_loads(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None = None,
) -> Float64:
    """Tokens that each rank receives through the actual tables, float64 ``[N, L, R]``.

    An expert's tokens split over the source ranks as in ``source_RLE``, and each part goes to the replica that its
    rank's table names.
    """
    return split_loads(heat_NLE, placement, log2phy_RLE, source_RLE, "tables")


def split_loads(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
) -> Float64:
    """Tokens that each rank receives, float64 ``[N, L, R]``; arguments as for ``split_shares``.

    A host that splits by step has the best split of each row's tokens, whole where heat is of an integer type.
    """
    if split == STEP:
        whole = heat_NLE.dtype.kind in "iu"
        return loads_by_step(_wide(heat_NLE), placement.phy2log_LRS.copy(), whole)
    return loads_under(heat_NLE, placement, split_shares(heat_NLE, placement, log2phy_RLE, source_RLE, split))


def loads_under(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer], placement: Placement, share_LP: Float64
) -> Float64:
    """Tokens that each rank receives where slots have the shares ``share_LP``, float64 ``[N, L, R]``."""
    return loads_of_ranks(_wide(heat_NLE), placement.phy2log_LRS.copy(), share_LP)


def slowest_us(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    share_LP: Float64,
    curve: CostCurve,
) -> Float64:
    """Microseconds of each layer's slowest rank in each step under a cost curve, float64 ``[N, L]``.

    ``share_LP`` as ``split_shares`` gives it. NaN where a layer has no tokens.
    """
    wide_NLE = np.ascontiguousarray(heat_NLE, dtype=np.float64)
    return slowest_in_steps(wide_NLE, placement.phy2log_LRS.copy(), share_LP, numbers_of(curve))


def split_us(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    curve: CostCurve,
) -> Float64:
    """As ``slowest_us``, by how the host splits tokens; arguments as for ``split_shares``.

    What a stepwise split itself takes is left out (``split_cost``).
    """
    if split != STEP:
        share_LP = split_shares(heat_NLE, placement, log2phy_RLE, source_RLE, split)
        return slowest_us(heat_NLE, placement, share_LP, curve)
    us_NL = np.full((len(heat_NLE), placement.layers), np.nan)
    for begin in range(0, len(heat_NLE), _STEPS_AT_A_TIME):
        part = slice(begin, begin + _STEPS_AT_A_TIME)
        tokens_NLRS = stepwise_tokens(heat_NLE[part], placement)
        busy_NL = tokens_NLRS.any(axis=(2, 3))
        us_NL[part][busy_NL] = curve.rank_us(tokens_NLRS).max(axis=2)[busy_NL]
    return us_NL


def stepwise_tokens(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer], placement: Placement
) -> Float64:
    """Tokens of each slot where every row is split as well as can be, float64 ``[N, L, R, S]``.

    Whole where heat is of an integer type. There are many best splits; ``slots_by_step`` says which this is.
    """
    phy2log_LRS = placement.phy2log_LRS.copy()
    tokens_NLP = slots_by_step(_wide(heat_NLE), phy2log_LRS, heat_NLE.dtype.kind in "iu")
    return tokens_NLP.reshape(len(heat_NLE), *phy2log_LRS.shape)


def replicas_woken(
    heat_TLE: npt.NDArray[np.floating] | npt.NDArray[np.integer], placement: Placement
) -> float:
    """Slots of a rank that a stepwise split has read another replica of an expert: mean over steps, layers and ranks.

    Steps without tokens are left out; 0 where no step has any.
    """
    needed_TL = (heat_TLE > 0).sum(axis=2)
    busy_TL = np.concatenate(
        [
            (stepwise_tokens(heat_TLE[begin : begin + _STEPS_AT_A_TIME], placement) > 0).sum(axis=(2, 3))
            for begin in range(0, len(heat_TLE), _STEPS_AT_A_TIME)
        ]
    )
    woken_N = (busy_TL - needed_TL)[needed_TL > 0]
    return float(woken_N.mean()) / placement.ranks if woken_N.size else 0.0


def numbers_of(curve: CostCurve) -> Curve:
    """A cost curve as kernels take it."""
    return Curve(float(curve.floor_us), float(curve.read_us), float(curve.launch_us), float(curve.slope_us))


@dataclass(frozen=True)
class StepLoads:
    """Of the rank loads of K layers in each of T steps what deciding needs, without holding them all.

    Parameters
    ----------
    peak_TK, tokens_TK
        float64 ``[T, K]``, tokens of the rank that has most of them, and of all ranks.
    variance_K
        float64 ``[K]``, how much the ranks' parts of the tokens jump from step to step (``solver.window.Served``).
    loads_NKR
        float64 ``[N, K, R]``, tokens of each rank in each episode, as many as were asked for.
    rank_variance_K, expert_variance_K
        float64 ``[K]``, how much parts of the tokens jump from episode to episode: the ranks' and, split over
        replicas, the experts'.
    ranks
        R.
    """

    peak_TK: Float64
    tokens_TK: Float64
    variance_K: Float64
    loads_NKR: Float64
    rank_variance_K: Float64
    expert_variance_K: Float64
    ranks: int

    @property
    def par_K(self) -> Float64:
        """Peak-to-average ratio, the mean over the steps with tokens, float64 ``[K]``; NaN where none has."""
        return mean_par(peak_par(self.peak_TK, self.tokens_TK, self.ranks), axis=0)


def steps_under(
    heat_TLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    share_KP: Float64,
    layers: Sequence[int] | None = None,
    episodes: int = 0,
) -> StepLoads:
    """What ``loads_under`` gives, in short.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step.
    placement, share_KP
        Of the K layers asked for: their placements, and the share that each slot has.
    layers
        Which layers of the heat these are; all where it is ``None``.
    episodes
        N.
    """
    layer_K = np.arange(placement.layers) if layers is None else np.array(layers)
    found = served_window(_wide(heat_TLE), layer_K, placement.phy2log_LRS.copy(), share_KP, episodes)
    return StepLoads(*found, placement.ranks)


def split_steps(
    heat_TLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
    placement: Placement,
    log2phy_RKE: Int32,
    source_RKE: Float64 | None,
    split: str,
    layers: Sequence[int] | None = None,
    episodes: int = 0,
) -> StepLoads:
    """What ``split_loads`` gives, in short; ``layers`` and ``episodes`` as for ``steps_under``.

    A host that splits by step has no episodes: every step is balanced for itself.
    """
    asked_TKE = heat_TLE if layers is None else heat_TLE[:, list(layers)]
    if split != STEP:
        share_KP = split_shares(asked_TKE, placement, log2phy_RKE, source_RKE, split)
        return steps_under(heat_TLE, placement, share_KP, layers, episodes)
    loads_TKR = split_loads(asked_TKE, placement, log2phy_RKE, source_RKE, split)
    none_K = np.zeros(placement.layers)
    return StepLoads(
        loads_TKR.max(axis=2),
        loads_TKR.sum(axis=2),
        none_K,
        loads_TKR[:0],
        none_K,
        none_K,
        placement.ranks,
    )


def _wide(
    heat_NLE: npt.NDArray[np.floating] | npt.NDArray[np.integer],
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Heat in a type that the kernels take; each is compiled where it first comes up."""
    kinds = (np.int32, np.int64, np.float64)
    wide_NLE = heat_NLE if heat_NLE.dtype in kinds else heat_NLE.astype(np.float64)
    return np.ascontiguousarray(wide_NLE)
