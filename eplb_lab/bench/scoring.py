"""Score placements from any policy, including peers that place an expert twice on the same rank.

This code is independent of the planner's scoring, so that the planner is not scored by its own code.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from eplb_core.placement import default_log2phy
from eplb_core.solver.stepwise import loads_by_step, slots_by_step
from eplb_lab.bench.decision import Float64, Int32


def even_par(heat_TLE: npt.NDArray[np.generic], placement_LRS: Int32) -> Float64:
    """Return the mean PAR per layer if each token goes to a random replica of its expert, float64 ``[L]``.

    All replicas of an expert are equally likely, and tokens are whole.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert.
    placement_LRS
        int32 ``[L, R, S]``, logical expert of each slot.

    Examples
    --------
    Expert 0 has a replica on each rank, so its 1000 tokens are divided at random between the ranks:

    >>> heat_TLE = np.array([[[1000, 100, 100]]])
    >>> even_par(heat_TLE, np.array([[[0, 1], [0, 2]]])).round(2)
    array([1.03])
    """
    layers = []
    for layer, placed_RS in enumerate(placement_LRS):
        replicas_E = np.bincount(placed_RS.ravel(), minlength=heat_TLE.shape[2])
        share_ER = np.zeros((heat_TLE.shape[2], placed_RS.shape[0]))
        np.add.at(share_ER, (placed_RS, np.arange(placed_RS.shape[0])[:, None]), 1.0 / replicas_E[placed_RS])
        layers.append(peak_to_average(whole_loads(heat_TLE[:, layer], share_ER)))
    return np.array(layers)


def whole_loads(heat_TE: npt.NDArray[np.generic], share_ER: Float64) -> Float64:
    """Sample the number of tokens of one layer that each rank receives in each step, float64 ``[T, R]``.

    The sample is deterministic: the same arguments give the same tokens.

    Parameters
    ----------
    heat_TE
        ``[T, E]``, tokens per step and expert.
    share_ER
        float64 ``[E, R]``, expected fraction of each expert's tokens that each rank receives.
    """
    heat_TE = heat_TE.astype(np.float64)
    split_E = share_ER.max(axis=1) < 1.0 - 1e-9
    loads_TR: Float64 = heat_TE[:, ~split_E] @ share_ER[~split_E]
    if split_E.any():
        odds_XR = share_ER[split_E] / share_ER[split_E].sum(axis=1, keepdims=True)
        whole_TX = np.floor(heat_TE[:, split_E])
        generator = np.random.default_rng(0)
        loads_TR += generator.multinomial(whole_TX.astype(np.int64), odds_XR).sum(axis=1)
        # Only averaged heat has fractional tokens. Divide them according to the expected fractions.
        loads_TR += (heat_TE[:, split_E] - whole_TX) @ odds_XR
    return loads_TR


def stepwise_par(heat_TLE: npt.NDArray[np.generic], placement_LRS: Int32) -> Float64:
    """Return the mean PAR per layer if each step's tokens are split optimally over the replicas, float64 ``[L]``.

    This is the optimum of LPLB's linear program, which minimises the load of the hottest rank over all splits. It is
    computed by an exact maximum flow.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert.
    placement_LRS
        int32 ``[L, R, S]``, logical expert of each slot.

    References
    ----------
    DeepSeek LPLB, https://github.com/deepseek-ai/LPLB.
    """
    loads_TLR = loads_by_step(np.ascontiguousarray(heat_TLE, dtype=np.float64), placement_LRS.copy(), False)
    return np.array([peak_to_average(loads_TR) for loads_TR in loads_TLR.transpose(1, 0, 2)])


def stale_par(
    heat_TLE: npt.NDArray[np.generic], before_LE: npt.NDArray[np.generic], placement_LRS: Int32
) -> Float64:
    """Return the mean PAR per layer if each step's tokens follow the split that was optimal for the previous step.

    This is LPLB's program, solved on the counts of the previous step, so that no rank waits for the current ones.
    Tokens follow the shares exactly. An expert without tokens in the previous step is split evenly.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert.
    before_LE
        ``[L, E]``, tokens in the step before the first one.
    placement_LRS
        int32 ``[L, R, S]``, logical expert of each slot.

    Examples
    --------
    Both ranks hold expert 0. In the previous step, expert 1 kept rank 0 busy, so the optimal split sent all tokens of
    expert 0 to rank 1. This split still applies, although expert 1 now has no tokens:

    >>> heat_TLE = np.array([[[10, 0]]])
    >>> stale_par(heat_TLE, np.array([[10, 10]]), np.array([[[0, 1], [0, 0]]], dtype=np.int32))
    array([2.])
    """
    earlier_TLE = np.concatenate([before_LE[None], heat_TLE[:-1]]).astype(np.float64)
    layers, ranks, slots = placement_LRS.shape
    placed_LP = placement_LRS.reshape(layers, -1)
    tokens_TLP = slots_by_step(earlier_TLE, placement_LRS.copy(), False)
    par_L = []
    for layer, placed_P in enumerate(placed_LP):
        total_TP = earlier_TLE[:, layer, placed_P]
        even_P = 1.0 / np.bincount(placed_P)[placed_P]
        share_TP = np.where(total_TP > 0, tokens_TLP[:, layer] / np.maximum(total_TP, 1.0), even_P)
        load_TP = share_TP * heat_TLE[:, layer, placed_P]
        par_L.append(peak_to_average(load_TP.reshape(-1, ranks, slots).sum(axis=2)))
    return np.array(par_L)


def rule_tables(placement_LRS: Int32, experts: int) -> Int32:
    """Return the engines' tables, int32 ``[R, L, E]``: rank ``r`` sends to replica ``r % replicas``, in slot order.

    Parameters
    ----------
    placement_LRS
        int32 ``[L, R, S]``, logical expert of each slot.
    experts
        E, the number of logical experts.

    Examples
    --------
    Experts 0 and 1 are in slots 0 and 1 of rank 0. Rank 1 holds expert 0 in slot 2 and expert 2 in slot 3:

    >>> rule_tables(np.array([[[0, 1], [0, 2]]], dtype=np.int32), experts=3)[:, 0]
    array([[0, 1, 3],
           [2, 1, 3]], dtype=int32)
    """
    return np.stack([default_log2phy(placed_RS, experts) for placed_RS in placement_LRS], axis=1)


def realised_par(
    heat_TLE: npt.NDArray[np.generic], slots: int, tables_RLE: Int32, mix_RLE: Float64 | None = None
) -> Float64:
    """Return the mean PAR per layer if tokens are dispatched according to tables, float64 ``[L]``.

    Tokens are whole: each token's source rank is sampled.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert.
    slots
        S, the number of slots per rank.
    tables_RLE
        int32 ``[R, L, E]``, physical slot to which each source rank sends each expert's tokens.
    mix_RLE
        float64 ``[R, L, E]``, fraction of each expert's tokens that comes from each source rank. ``None`` if every
        expert's tokens come equally from all ranks.

    Examples
    --------
    Both ranks send expert 0 to slot 0 of rank 0, which therefore receives three quarters of the tokens:

    >>> tables_RLE = np.array([[[0, 1]], [[0, 1]]], dtype=np.int32)
    >>> realised_par(np.array([[[30, 10]]]), slots=1, tables_RLE=tables_RLE)
    array([1.5])
    """
    ranks, layers, experts = tables_RLE.shape
    par_L = []
    for layer in range(layers):
        source_RE = np.full((ranks, experts), 1.0 / ranks) if mix_RLE is None else mix_RLE[:, layer]
        share_ER = np.zeros((experts, ranks))
        np.add.at(share_ER, (np.arange(experts)[None, :], tables_RLE[:, layer] // slots), source_RE)
        par_L.append(peak_to_average(whole_loads(heat_TLE[:, layer], share_ER)))
    return np.array(par_L)


def sampled_loads(source_TRE: npt.NDArray[np.generic], slots: int, table_RE: Int32) -> Float64:
    """Return one layer's rank loads, float64 ``[T, R]``, given the recorded source rank of each token.

    Parameters
    ----------
    source_TRE
        ``[T, R, E]``, tokens per step, source rank and expert.
    slots
        S, the number of slots per rank.
    table_RE
        int32 ``[R, E]``, physical slot to which each source rank sends each expert's tokens.
    """
    steps, ranks, experts = source_TRE.shape
    receives_XR = np.zeros((ranks * experts, ranks), dtype=np.float32)
    receives_XR[np.arange(ranks * experts), (table_RE // slots).ravel()] = 1.0
    # Whole tokens below 2**24 are exact in float32.
    return (source_TRE.reshape(steps, -1).astype(np.float32) @ receives_XR).astype(np.float64)


def peak_to_average(load_TR: Float64) -> float:
    """Return the PAR of rank loads ``[T, R]``, averaged over the steps that have tokens; NaN if there are none.

    Examples
    --------
    >>> peak_to_average(np.array([[3.0, 1.0], [0.0, 0.0], [2.0, 2.0]]))
    1.25
    """
    mean_T = load_TR.mean(axis=1)
    busy_T = mean_T > 0
    return float((load_TR.max(axis=1)[busy_T] / mean_T[busy_T]).mean()) if busy_T.any() else math.nan
