"""Balance of placements of any origin: peers may put an expert twice on a rank.

Written apart from the planner's own scoring, so that neither is judged by itself.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from eplb_core.placement import default_log2phy
from eplb_core.solver.stepwise import loads_by_step
from eplb_lab.bench.decision import Float64, Int32


def even_par(heat_TLE: npt.NDArray[np.generic], placement_LRS: Int32) -> Float64:
    """Return the peak-to-average ratio per step if experts are split evenly over their replicas, float64 ``[L]``.

    Tokens stay whole: each goes to one of the replicas, with equal odds.
    """
    layers = []
    for layer, placed_RS in enumerate(placement_LRS):
        replicas_E = np.bincount(placed_RS.ravel(), minlength=heat_TLE.shape[2])
        part_ER = np.zeros((heat_TLE.shape[2], placed_RS.shape[0]))
        np.add.at(part_ER, (placed_RS, np.arange(placed_RS.shape[0])[:, None]), 1.0 / replicas_E[placed_RS])
        layers.append(peak_to_average(whole_loads(heat_TLE[:, layer], part_ER)))
    return np.array(layers)


def whole_loads(heat_TE: npt.NDArray[np.generic], part_ER: Float64) -> Float64:
    """Draw the tokens of one layer that each rank receives, float64 ``[T, R]``.

    ``part_ER`` float64 ``[E, R]`` is the expected part of an expert's tokens that a rank receives. The same arguments
    give the same tokens.
    """
    heat_TE = heat_TE.astype(np.float64)
    split_E = part_ER.max(axis=1) < 1.0 - 1e-9
    loads_TR: Float64 = heat_TE[:, ~split_E] @ part_ER[~split_E]
    if split_E.any():
        odds_XR = part_ER[split_E] / part_ER[split_E].sum(axis=1, keepdims=True)
        whole_TX = np.floor(heat_TE[:, split_E])
        generator = np.random.default_rng(0)
        loads_TR += generator.multinomial(whole_TX.astype(np.int64), odds_XR).sum(axis=1)
        # Only averaged heat has fractions of a token.
        loads_TR += (heat_TE[:, split_E] - whole_TX) @ odds_XR
    return loads_TR


def stepwise_par(heat_TLE: npt.NDArray[np.generic], placement_LRS: Int32) -> Float64:
    """Peak-to-average ratio per step, each step's tokens split as well as they can be, float64 ``[L]``.

    That is the optimum of LPLB's linear program, which lowers the hottest rank over all splits; an exact max-flow finds
    it.

    References
    ----------
    DeepSeek LPLB, https://github.com/deepseek-ai/LPLB.
    """
    loads_TLR = loads_by_step(np.ascontiguousarray(heat_TLE, dtype=np.float64), placement_LRS.copy(), False)
    return np.array([peak_to_average(loads_TR) for loads_TR in loads_TLR.transpose(1, 0, 2)])


def rule_tables(placement_LRS: Int32, experts: int) -> Int32:
    """The engines' tables, replica ``rank % replicas`` in order of slot, int32 ``[R, L, E]``."""
    return np.stack([default_log2phy(placed_RS, experts) for placed_RS in placement_LRS], axis=1)


def realised_par(
    heat_TLE: npt.NDArray[np.generic], slots: int, tables_RLE: Int32, mix_RLE: Float64 | None = None
) -> Float64:
    """Return the peak-to-average ratio per step through tables, in whole tokens, float64 ``[L]``.

    ``mix_RLE`` float64 ``[R, L, E]`` says how each expert's tokens split over the source ranks; evenly without it.
    """
    ranks, layers, experts = tables_RLE.shape
    found = []
    for layer in range(layers):
        share_RE = np.full((ranks, experts), 1.0 / ranks) if mix_RLE is None else mix_RLE[:, layer]
        part_ER = np.zeros((experts, ranks))
        np.add.at(part_ER, (np.arange(experts)[None, :], tables_RLE[:, layer] // slots), share_RE)
        found.append(peak_to_average(whole_loads(heat_TLE[:, layer], part_ER)))
    return np.array(found)


def sampled_loads(source_TRE: npt.NDArray[np.generic], slots: int, table_RE: Int32) -> Float64:
    """Rank loads of one layer, float64 ``[T, R]``, where tokens are known by step, source rank and expert."""
    steps, ranks, experts = source_TRE.shape
    goes_to = np.zeros((ranks * experts, ranks), dtype=np.float32)
    goes_to[np.arange(ranks * experts), (table_RE // slots).ravel()] = 1.0
    # Whole tokens below 2**24 are exact in float32.
    return (source_TRE.reshape(steps, -1).astype(np.float32) @ goes_to).astype(np.float64)


def peak_to_average(load_TR: Float64) -> float:
    """Largest rank load over the mean rank load, averaged over the steps that have tokens; NaN where none has."""
    mean_T = load_TR.mean(axis=1)
    busy_T = mean_T > 0
    return float((load_TR.max(axis=1)[busy_T] / mean_T[busy_T]).mean()) if busy_T.any() else math.nan
