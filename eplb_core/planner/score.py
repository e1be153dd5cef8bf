"""Loads of ranks under a placement and its tables, the noise floor beneath them, and the gain of one over another.

Loads of single steps are of whole tokens (``solver.whole_tokens``), as ranks count them. Loads of episodes, which the
search works on, are expected ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Float64, Int32, Placement, mean_par, peak_par, step_par, with_entries
from eplb_core.planner.dealing import entry_parts
from eplb_core.planner.settings import EVEN, STEP
from eplb_core.solver.stepwise import loads_by_step, slots_by_step
from eplb_core.solver.whole_tokens import HostSplit, ServedSteps, serve_steps
from eplb_core.solver.window import (
    episode_loads,
    inflation_error,
    loads_of_ranks,
    shares_of_slots,
    standard_error,
)

Heat = npt.NDArray[np.floating] | npt.NDArray[np.integer]
"""Tokens of each expert in each step, ``[T, L, E]``."""
_STEPS_AT_A_TIME = 32
"""Steps whose tokens are held by slot."""
_CONFIDENCE = 0.95
"""Of the intervals that operators read."""
_DRAWN_STEPS, _MAX_DRAWS = 1024, 8
"""Steps that the draws of a window have together, and the most draws. The mean ratio of one token is then 1 % off."""
_STEPS_OF_A_DRAW = 1 << 32
"""Numbers of steps by which draws are apart."""
_FEW_PER_RANK, _MOST_FEW = 8, 512
"""Tokens per rank, and in all, up to which the noise floor is exact. Beyond, it is 0.3 % off at most (64 ranks)."""
_FLOOR_ERROR = 1e-6
"""Probability of a larger count that the exact floor leaves out."""
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


def expected_loads(
    heat_NLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
) -> Float64:
    """Return the expected tokens of each rank, float64 ``[N, L, R]``; arguments as for ``split_shares``.

    Use it for episodes, which hold many tokens. A host that splits by step has the best split of each row's tokens,
    whole if heat is of an integer type.
    """
    phy2log_LRS = placement.phy2log_LRS.copy()
    if split == STEP:
        return loads_by_step(_wide(heat_NLE), phy2log_LRS, heat_NLE.dtype.kind in "iu")
    share_LP = split_shares(heat_NLE, placement, log2phy_RLE, source_RLE, split)
    return loads_of_ranks(_wide(heat_NLE), phy2log_LRS, share_LP)


def split_loads(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    first_step: int = 0,
) -> Float64:
    """Return the whole tokens that each rank receives in each step, float64 ``[T, L, R]``.

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split
        As for ``split_shares``.
    first_step
        Number of the first step: what is drawn for a step depends on its number.
    """
    if split == STEP:
        return expected_loads(heat_TLE, placement, log2phy_RLE, source_RLE, split)
    served, _ = _served(
        heat_TLE, placement, log2phy_RLE, source_RLE, split, None, first_step, keep_loads=True
    )
    return served.loads_TKR


def _served(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    layer_K: npt.NDArray[np.int64] | None,
    first_step: int = 0,
    curve: CostCurve | None = None,
    *,
    keep_loads: bool = False,
) -> tuple[ServedSteps, Float64]:
    """Serve each step's whole tokens; arguments as for ``split_steps`` and ``split_us``.

    Returns
    -------
    tuple of ServedSteps and Float64
        The loads, and the slots' expected shares, float64 ``[K, R*S]``.
    """
    layer_K = np.arange(placement.layers) if layer_K is None else layer_K
    curve_4 = np.zeros(0) if curve is None else numbers_of(curve)
    host = _host_split(heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K)
    phy2log_KRS = placement.phy2log_LRS.copy()
    served = serve_steps(_wide(heat_TLE), layer_K, phy2log_KRS, host, curve_4, first_step, keep_loads)
    return served, host.share_KP


def _host_split(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    layer_K: npt.NDArray[np.int64],
) -> HostSplit:
    """Return the split as the kernel reads it; arguments as for ``_served``."""
    layers, experts = placement.layers, placement.experts
    deals = split != EVEN and with_entries(log2phy_RLE, 3).shape[3] > 1
    # Dealt shares depend on how many tokens come; no others do.
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
    """Return the variance of many dealt tokens as a part of the multinomial variance, float64 ``[K, E]``.

    A source that deals ``n`` tokens to its entries gives each slot a fixed part of them. So the number of tokens at a
    slot varies only because the sources' numbers do.
    """
    width = table_KRED.shape[3]
    # For a source, the sum over its slots of the squared part of its tokens that the slot receives.
    alike_KRE = np.zeros(table_KRED.shape[:3])
    for entry in range(width):
        alike_KRE += (table_KRED == table_KRED[..., entry, None]).sum(axis=3)
    by_source_KE = (source_KRE * alike_KRE / width**2).sum(axis=1)
    squares_KE = np.zeros_like(by_source_KE)
    expert_KP = placement.phy2log_LRS.reshape(placement.layers, -1)
    for layer in range(placement.layers):
        np.add.at(squares_KE[layer], expert_KP[layer], share_KP[layer] ** 2)
    spread_KE: Float64 = np.ones_like(by_source_KE)
    np.divide(by_source_KE - squares_KE, 1.0 - squares_KE, out=spread_KE, where=squares_KE < 1.0 - 1e-9)
    clipped_KE: Float64 = np.clip(spread_KE, 0.0, 1.0)
    return clipped_KE


def split_us(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    curve: CostCurve,
    first_step: int = 0,
    layer_K: npt.NDArray[np.int64] | None = None,
) -> Float64:
    """Return the microseconds of each layer's slowest rank in each step, float64 ``[T, L]``; NaN without tokens.

    The time of a stepwise split itself is not included (``price.SplitCost``).

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K
        As for ``split_steps``.
    curve
        Cost of tokens.
    first_step
        As for ``split_loads``.
    """
    layer_K = np.arange(placement.layers) if layer_K is None else layer_K
    if split != STEP:
        served, _ = _served(heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K, first_step, curve)
        by_batch_TK: Float64 = curve.batch_us * served.tokens_TK
        return served.us_TK + by_batch_TK
    heat_TKE = heat_TLE[:, layer_K]
    us_TK = np.full((len(heat_TKE), placement.layers), np.nan)
    for begin in range(0, len(heat_TKE), _STEPS_AT_A_TIME):
        part = slice(begin, begin + _STEPS_AT_A_TIME)
        tokens_TKRS = _stepwise_tokens(heat_TKE[part], placement)
        us_TK[part] = np.where(heat_TKE[part].any(axis=2), curve.slowest_us(tokens_TKRS), np.nan)
    return us_TK


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


@dataclass(frozen=True)
class ServedWindow:
    """Summary of a window's rank loads in K layers: it has millions of them, and deciding needs these alone.

    Parameters
    ----------
    peak_TK, tokens_TK
        float64 ``[T, K]``, whole tokens of the rank that has most of them, and of all ranks.
    variance_K
        float64 ``[K]``, variance of the ranks' jumps from step to step, as in ``EpisodeLoads``; 0 if the host splits by
        step.
    ranks
        R.
    loads_NKR, rank_variance_K, expert_variance_K
        As in ``EpisodeLoads``, expected; no rows and zeros if episodes were not asked for.
    """

    peak_TK: Float64
    tokens_TK: Float64
    variance_K: Float64
    ranks: int
    loads_NKR: Float64
    rank_variance_K: Float64
    expert_variance_K: Float64


def split_steps(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    episodes: int = 0,
    layer_K: npt.NDArray[np.int64] | None = None,
    first_step: int = 0,
) -> ServedWindow:
    """Summarize the loads of ``split_loads`` without holding them.

    A host that splits by step has no episodes: every step is balanced for itself.

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split
        As for ``split_shares``; all but the heat are of the layers asked for.
    episodes
        N, of the loads by episode.
    layer_K
        int64 ``[K]``, the layers of ``heat_TLE`` asked for; all by default.
    first_step
        As for ``split_loads``.
    """
    layer_K = np.arange(placement.layers) if layer_K is None else layer_K
    none_K = np.zeros(placement.layers)
    if split == STEP:
        loads_TKR = expected_loads(heat_TLE[:, layer_K], placement, log2phy_RLE, source_RLE, split)
        summary = loads_TKR.max(axis=2), loads_TKR.sum(axis=2), none_K, placement.ranks
        return ServedWindow(*summary, loads_TKR[:0], none_K, none_K)
    served, share_KP = _served(heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K, first_step)
    summary = served.peak_TK, served.tokens_TK, served.variance_K, placement.ranks
    if not episodes:
        return ServedWindow(*summary, np.zeros((0, placement.layers, placement.ranks)), none_K, none_K)
    phy2log_KRS = placement.phy2log_LRS.copy()
    return ServedWindow(*summary, *episode_loads(_wide(heat_TLE), layer_K, phy2log_KRS, share_KP, episodes))


@dataclass(frozen=True)
class KnownSplit:
    """A placement and its split of tokens, computed once to score steps as they arrive.

    ``host`` is ``None`` if the host splits each step by its own counts.
    """

    placement: Placement
    host: HostSplit | None

    @classmethod
    def of(
        cls, heat_TLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
    ) -> KnownSplit:
        """Compute the split from the heat of a window; arguments as for ``split_shares``."""
        if split == STEP:
            return cls(placement, None)
        layer_K = np.arange(placement.layers)
        return cls(placement, _host_split(heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K))

    def par_of_steps(self, heat_TLE: Heat, first_step: int) -> Float64:
        """Return the peak-to-average ratio of each step, float64 ``[T, L]``; NaN without tokens.

        ``first_step`` is that of ``split_loads``.
        """
        phy2log_LRS = self.placement.phy2log_LRS.copy()
        if self.host is None:
            return step_par(loads_by_step(_wide(heat_TLE), phy2log_LRS, heat_TLE.dtype.kind in "iu"))
        layer_K = np.arange(self.placement.layers)
        served = serve_steps(_wide(heat_TLE), layer_K, phy2log_LRS, self.host, np.zeros(0), first_step, False)
        return peak_par(served.peak_TK, served.tokens_TK, self.placement.ranks)


def par_by_step(served: ServedWindow) -> Float64:
    """Peak-to-average ratio of each step, float64 ``[T, K]``; NaN without tokens."""
    return peak_par(served.peak_TK, served.tokens_TK, served.ranks)


def drawn_par(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    layer_K: npt.NDArray[np.int64] | None = None,
) -> Float64:
    """Return the peak-to-average ratio of each step, mean over several draws of its tokens, float64 ``[T, K]``.

    Use it for few tokens per step, where the chance of a single draw is seen in the mean over a short window. Arguments
    as for ``split_steps``.
    """
    draws = int(np.clip(-(-_DRAWN_STEPS // max(len(heat_TLE), 1)), 1, _MAX_DRAWS))
    ways = heat_TLE, placement, log2phy_RLE, source_RLE, split
    pars = [
        par_by_step(split_steps(*ways, layer_K=layer_K, first_step=draw * _STEPS_OF_A_DRAW))
        for draw in range(draws)
    ]
    mean_TK: Float64 = np.mean(pars, axis=0)
    return mean_TK


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
    """Return the expected peak-to-average ratio of perfectly balanced ranks if tokens choose independently.

    It is exact for few tokens, of which each rank receives whole ones. For more it takes each rank's count for Poisson,
    and the expected largest of R such counts from Blom's normal score with the Cornish-Fisher term for skewness. Real
    routers leave a little less.

    Parameters
    ----------
    tokens_NL
        ``[N, L]``, tokens of all experts together in each step or episode.
    ranks
        R.

    Returns
    -------
    Float64
        float64 ``[L]``, mean over the rows with tokens; NaN if no row has any.
    """
    score = expected_hottest(ranks)
    mean_NL = tokens_NL / ranks
    busy_NL = mean_NL > 0
    safe_NL = np.where(busy_NL, mean_NL, 1.0)
    peak_NL = 1.0 + score / np.sqrt(safe_NL) + (score**2 - 1.0) / (6.0 * safe_NL)
    few_F = _floor_of_few(ranks)
    few_NL = busy_NL & (tokens_NL <= few_F.size)
    # Fractions of a token, which only averaged heat has, lie between whole numbers of them.
    peak_NL[few_NL] = np.interp(tokens_NL[few_NL], np.arange(1, few_F.size + 1), few_F)
    return mean_par(np.where(busy_NL, np.clip(peak_NL, 1.0, ranks), np.nan), axis=0)


@cache
def _floor_of_few(ranks: int) -> Float64:
    """Return the expected ratio of 1, 2, 3 ... tokens that each choose one of so many ranks, float64 ``[F]``.

    The largest count is at most ``m`` with the probability that R Poisson counts of at most ``m`` add up to the number
    of tokens, divided by the probability that any do.
    """
    few = min(_FEW_PER_RANK * ranks, _MOST_FEW)
    count_F = np.arange(few + 1)
    log_factorial_F = np.array([math.lgamma(count + 1) for count in count_F])
    mean = few / ranks
    one_F = np.exp(count_F * math.log(mean) - mean - log_factorial_F)
    all_F = np.exp(count_F * math.log(few) - few - log_factorial_F)
    peak_F = np.zeros(few + 1)
    for most in count_F:
        below_F = np.ones(1)
        base_F = np.where(count_F <= most, one_F, 0.0)
        # The sum of R counts, by squaring.
        for bit in bin(ranks)[2:]:
            below_F = np.convolve(below_F, below_F)[: few + 1]
            if bit == "1":
                below_F = np.convolve(below_F, base_F)[: few + 1]
        above_F = 1.0 - np.minimum(below_F / all_F, 1.0)
        peak_F += above_F
        if above_F.max() < _FLOOR_ERROR:
            break
    found_F: Float64 = peak_F[1:] * ranks / count_F[1:]
    found_F.setflags(write=False)
    return found_F


def sampling_floor(served: ServedWindow) -> Float64:
    """Return ``noise_floor`` of single steps, less if the ranks' measured jumps are less, float64 ``[K]``.

    Real routers' choices are not independent: a token never chooses an expert twice. But some rank always has a whole
    token more than the mean, unless tokens divide evenly. 1 if the host splits by step.
    """
    ranks = served.ranks
    busy_TK = served.tokens_TK > 0
    tokens_TK = np.where(busy_TK, served.tokens_TK, 1.0)
    floor_K = noise_floor(served.tokens_TK, ranks)
    if len(tokens_TK) > 1:
        # The ranks' parts of independent tokens have this variance in all.
        independent_K = mean_par(np.where(busy_TK, (1.0 - 1.0 / ranks) / tokens_TK, np.nan), axis=0)
        measured_K = np.ones_like(floor_K)
        np.divide(served.variance_K, independent_K, out=measured_K, where=independent_K > 0)
        floor_K = 1.0 + (floor_K - 1.0) * np.sqrt(np.minimum(measured_K, 1.0))
    whole_TK = np.where(busy_TK, np.ceil(tokens_TK / ranks) * ranks / tokens_TK, np.nan)
    return np.maximum(floor_K, mean_par(np.minimum(whole_TK, ranks), axis=0))


def volatility_bound(served: ServedWindow) -> Float64:
    """Peak-to-average ratio that ranks balanced in the mean have because of their experts' jumps, float64 ``[L]``.

    From step to step an expert's heat jumps. Jumps are taken between episodes in a row, so a trend or a slow change of
    the workload is not mistaken for them. Where a token's choices make room for each other (it never chooses an expert
    twice), ranks jump less than their experts' jumps sum up to; then theirs count. 1.0 where fewer than two episodes
    have tokens.
    """
    variance_L = np.minimum(served.expert_variance_K, served.rank_variance_K)
    return balanced_par(variance_L, served.ranks)


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
