"""Loads of ranks under a placement and its tables, the noise floor beneath them, and the gain of one over another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve
from eplb_service.placement import Float64, Int32, Placement, mean_par, peak_par, with_entries
from eplb_service.planner.dealing import entry_parts
from eplb_service.planner.settings import EVEN, STEP
from eplb_service.solver.stepwise import loads_by_step, slots_by_step
from eplb_service.solver.time_costs import slowest_in_steps
from eplb_service.solver.window import (
    ServedWindow,
    inflation_error,
    loads_of_ranks,
    served_window,
    shares_of_slots,
    standard_error,
)

Heat = npt.NDArray[np.floating] | npt.NDArray[np.integer]
"""Tokens of each expert in each step, ``[T, L, E]``."""
_STEPS_AT_A_TIME = 32
"""Steps whose tokens are held by slot."""
_CONFIDENCE = 0.95
"""Of the intervals that operators read."""
_PAID_ERRORS = 1.0
"""Standard errors above zero at which a change has paid."""


def source_shares(source_RLE: Float64 | None, ranks: int, layers: int, experts: int) -> Float64:
    """Each expert's split over the source ranks, summing to 1, float64 ``[R, L, E]``.

    Uniform where it is unknown (``source_RLE`` is ``None``, or an expert got no tokens).
    """
    shares_RLE: Float64 = np.full((ranks, layers, experts), 1.0 / ranks)
    if source_RLE is not None:
        total_LE = source_RLE.sum(axis=0)
        np.divide(source_RLE, total_LE, out=shares_RLE, where=total_LE > 0)
    return shares_RLE


def split_shares(
    heat_TLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
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
    layers, ranks, slots = placement.phy2log_LRS.shape
    if split == EVEN:
        expert_LP = placement.phy2log_LRS.reshape(layers, -1)
        share_LP: Float64 = 1.0 / np.take_along_axis(placement.replicas(), expert_LP, axis=1)
        return share_LP
    sources, width = log2phy_RLE.shape[0], with_entries(log2phy_RLE, 3).shape[3]
    parts_RLED: Float64 | None = None
    if width > 1:
        shares_RLE = source_shares(source_RLE, sources, layers, placement.experts)
        parts_RLED = shares_RLE[..., None] * entry_parts(shares_RLE * heat_TLE.mean(axis=0), width)
    share_LP = np.empty((layers, ranks * slots))
    if parts_RLED is not None:
        for layer in range(layers):
            parts_X, table_X = parts_RLED[:, layer].ravel(), log2phy_RLE[:, layer].ravel()
            share_LP[layer] = np.bincount(table_X, parts_X, minlength=ranks * slots)
        return share_LP
    uniform = source_RLE is None
    tokens_RLE = np.ones((sources, 1, placement.experts)) if source_RLE is None else source_RLE
    tables_RLE, tokens_RLE = np.ascontiguousarray(log2phy_RLE), np.ascontiguousarray(tokens_RLE)
    for layer, phy2log_RS in enumerate(placement.phy2log_LRS.copy()):
        share_LP[layer] = shares_of_slots(phy2log_RS, tables_RLE, layer, tokens_RLE, 0 if uniform else layer)
    return share_LP


def split_loads(
    heat_TLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
) -> Float64:
    """Tokens that each rank receives, float64 ``[T, L, R]``; arguments as for ``split_shares``.

    A host that splits by step has the best split of each row's tokens, whole where heat is of an integer type.
    """
    phy2log_LRS = placement.phy2log_LRS.copy()
    if split == STEP:
        return loads_by_step(_wide(heat_TLE), phy2log_LRS, heat_TLE.dtype.kind in "iu")
    share_LP = split_shares(heat_TLE, placement, log2phy_RLE, source_RLE, split)
    return loads_of_ranks(_wide(heat_TLE), phy2log_LRS, share_LP)


def split_us(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    curve: CostCurve,
) -> Float64:
    """Microseconds of each layer's slowest rank in each step under a cost curve, float64 ``[T, L]``.

    NaN where a layer has no tokens. Arguments as for ``split_shares``. What a stepwise split itself takes is left out
    (``price.SplitCost``).
    """
    if split != STEP:
        share_LP = split_shares(heat_TLE, placement, log2phy_RLE, source_RLE, split)
        phy2log_LRS, curve_4 = placement.phy2log_LRS.copy(), numbers_of(curve)
        slowest_TL = slowest_in_steps(_wide(heat_TLE), phy2log_LRS, share_LP, curve_4)
        slowest_TL += curve.batch_us * heat_TLE.sum(axis=2)
        return slowest_TL
    us_TL = np.full((len(heat_TLE), placement.layers), np.nan)
    for begin in range(0, len(heat_TLE), _STEPS_AT_A_TIME):
        part = slice(begin, begin + _STEPS_AT_A_TIME)
        tokens_TLRS = _stepwise_tokens(heat_TLE[part], placement)
        us_TL[part] = np.where(heat_TLE[part].any(axis=2), curve.slowest_us(tokens_TLRS), np.nan)
    return us_TL


def _stepwise_tokens(heat_TLE: Heat, placement: Placement) -> Float64:
    """Tokens of each slot where every row is split as well as can be, float64 ``[T, L, R, S]``.

    Whole where heat is of an integer type. There are many best splits; ``slots_by_step`` says which this is.
    """
    phy2log_LRS = placement.phy2log_LRS.copy()
    tokens_TLP = slots_by_step(_wide(heat_TLE), phy2log_LRS, heat_TLE.dtype.kind in "iu")
    return tokens_TLP.reshape(len(heat_TLE), *phy2log_LRS.shape)


def numbers_of(curve: CostCurve) -> Float64:
    """A cost curve as kernels take it, without what the batch takes on all ranks."""
    return np.array([curve.floor_us, curve.read_us, curve.launch_us, curve.slope_us])


def split_steps(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    episodes: int = 0,
) -> ServedWindow:
    """Summary of the loads that ``split_loads`` gives, which are not held.

    A host that splits by step has no episodes: every step is balanced for itself.

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split
        As for ``split_shares``.
    episodes
        N, of the loads by episode.
    """
    if split != STEP:
        share_LP = split_shares(heat_TLE, placement, log2phy_RLE, source_RLE, split)
        layer_L = np.arange(placement.layers)
        return served_window(_wide(heat_TLE), layer_L, placement.phy2log_LRS.copy(), share_LP, episodes)
    loads_TLR = split_loads(heat_TLE, placement, log2phy_RLE, source_RLE, split)
    none_L = np.zeros(placement.layers)
    return ServedWindow(loads_TLR.max(axis=2), loads_TLR.sum(axis=2), none_L, loads_TLR[:0], none_L, none_L)


def par_by_step(served: ServedWindow) -> Float64:
    """Peak-to-average ratio of each step, float64 ``[T, K]``; NaN without tokens."""
    return peak_par(served.peak_TK, served.tokens_TK, served.loads_NKR.shape[2])


def par_of_steps(served: ServedWindow) -> Float64:
    """The mean over the steps with tokens, float64 ``[K]``; NaN where none has."""
    return mean_par(par_by_step(served), axis=0)


def _wide(heat_TLE: Heat) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Heat in a type that the kernels take; each is compiled where it first comes up."""
    taken = heat_TLE.dtype in (np.int32, np.int64, np.float64)
    wide_TLE: npt.NDArray[Any] = heat_TLE if taken else heat_TLE.astype(np.float64)
    return np.ascontiguousarray(wide_TLE)


def expected_hottest(ranks: int) -> float:
    """Standard deviations by which the largest of so many normal values is expected above their mean.

    References
    ----------
    G. Blom, *Statistical Estimates and Transformed Beta-Variables*, 1958.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def noise_floor(tokens_NL: Heat, ranks: int) -> Float64:
    """Expected peak-to-average ratio of perfectly balanced ranks where tokens choose independently, float64 ``[L]``.

    A rank's tokens in a step are then nearly Poisson; the expected largest of R such counts is taken from Blom's normal
    score with the Cornish-Fisher term for skewness. ``tokens_NL`` are those of all experts together in each step or
    episode; the mean is over those with tokens, NaN where none has. Real routers leave a little less.
    """
    score = expected_hottest(ranks)
    mean_NL = tokens_NL / ranks
    busy_NL = mean_NL > 0
    safe_NL = np.where(busy_NL, mean_NL, 1.0)
    peak_NL = 1.0 + score / np.sqrt(safe_NL) + (score**2 - 1.0) / (6.0 * safe_NL)
    # Where there are fewer tokens than ranks one of them still takes a whole token.
    return mean_par(np.where(busy_NL, np.clip(peak_NL, 1.0, ranks), np.nan), axis=0)


def sampling_floor(served: ServedWindow, ranks: int) -> Float64:
    """``noise_floor`` of single steps, or less where ranks' measured jumps leave less, float64 ``[K]``.

    Real routers' choices are not independent draws. 1 where the host splits by step.
    """
    floor_K = noise_floor(served.tokens_TK, ranks)
    if len(served.tokens_TK) > 1:
        floor_K = np.minimum(floor_K, balanced_par(served.variance_K, ranks))
    return floor_K


def volatility_bound(served: ServedWindow) -> Float64:
    """Peak-to-average ratio that ranks balanced in the mean have because of their experts' jumps, float64 ``[L]``.

    From step to step an expert's heat jumps. Jumps are taken between episodes in a row, so a trend or a slow change of
    the workload is not mistaken for them. Where a token's choices make room for each other (it never chooses an expert
    twice), ranks jump less than their experts' jumps sum up to; then theirs count. 1.0 where fewer than two episodes
    have tokens.
    """
    variance_L = np.minimum(served.expert_variance_K, served.rank_variance_K)
    return balanced_par(variance_L, served.loads_NKR.shape[2])


def balanced_par(variance_L: Float64, ranks: int) -> Float64:
    """Peak-to-average ratio of ranks balanced in the mean whose parts of the tokens jump by ``variance_L`` in all."""
    # Parts of all tokens to parts of a rank's, and the variance of all ranks to that of one.
    bound_L: Float64 = 1.0 + expected_hottest(ranks) * np.sqrt(variance_L * ranks)
    return bound_L


@dataclass(frozen=True)
class Gain:
    """A mean over steps with its 95 % interval, in the unit of what was compared; NaN where nothing was."""

    mean: float
    low: float
    high: float
    error: float

    @property
    def known(self) -> bool:
        """True where there were steps enough for an interval."""
        return math.isfinite(self.mean) and math.isfinite(self.error)

    @property
    def paid(self) -> bool | None:
        """True where the mean is above zero by more than its standard error; ``None`` where that is not known."""
        return self.mean > _PAID_ERRORS * self.error if self.known else None


def gain_of(
    before_TL: Float64, after_TL: Float64, ahead: float | None = None, missed: Sequence[float] = ()
) -> Gain:
    """Gain of ``after`` over ``before`` on the same steps, in the mean over the layers.

    Steps in a row resemble each other, and the interval is as much wider (``solver.window.standard_error``).

    Parameters
    ----------
    before_TL, after_TL
        float64 ``[T, L]``, ratios or times of the same steps; NaN without tokens, which say nothing.
    ahead
        So many steps' gain, which come after these, is what the interval is of: their mean scatters as well. ``None``
        for these steps' own.
    missed
        How far the gains that came were from the means that the last forecasts gave: the interval reaches as far as the
        largest, as what comes may change in ways that these steps do not show.
    """
    won_T = mean_par(before_TL - after_TL, axis=1)
    won_T = won_T[~np.isnan(won_T)]
    if not won_T.size:
        return Gain(math.nan, math.nan, math.nan, math.inf)
    mean, error = float(won_T.mean()), standard_error(won_T)
    sure, half = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2), won_T.size // 2
    reach = sure * error
    if ahead is not None and half:
        # How much neighbours resemble each other is itself an estimate, and a low one (Bartlett's).
        reach *= math.sqrt((1.0 + won_T.size / ahead) * (1.0 + inflation_error(won_T.size)))
        # What has changed between the halves goes on as a random walk does.
        walked = float(won_T[half:].mean() - won_T[:half].mean())
        reach = math.hypot(reach, sure * walked * math.sqrt(1.0 + ahead / won_T.size))
    reach = max([reach, *missed])
    return Gain(mean, mean - reach, mean + reach, error)
