"""Rank loads under a placement and its tables, their noise floor, and the gain of one layout over another.

Loads of individual steps consist of whole tokens (``solver.whole_tokens``), as counted by the ranks. Loads of episodes,
which the search uses, are expected values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Float64, Int32, Placement, mean_par, peak_par, step_par
from eplb_core.planner.settings import STEP
from eplb_core.planner.token_split import Heat, as_kernel_heat, host_split, split_shares
from eplb_core.solver.stepwise import loads_by_step, slots_by_step
from eplb_core.solver.whole_tokens import HostSplit, ServedSteps, serve_steps
from eplb_core.solver.window import episode_loads, inflation_error, loads_of_ranks, standard_error

_CHUNK_STEPS = 32
"""Number of steps whose slot loads are in memory at the same time."""
_CONFIDENCE = 0.95
"""Confidence level of the intervals shown to operators."""
_DRAWN_STEPS = 1024
"""Target number of steps drawn per window, counting every draw of a step. With one token per step, the mean PAR then
has an error of 1 %."""
_MAX_DRAWS = 8
"""Maximum number of draws per window."""
_DRAW_OFFSET = 1 << 32
"""Offset between the step numbers of two draws, which gives each draw its own random numbers."""
_EXACT_TOKENS_PER_RANK = 8
"""Maximum number of tokens per rank for exact computation of the noise floor. With more tokens, the error is at
most 0.3 % (64 ranks)."""
_MAX_EXACT_TOKENS = 512
"""Maximum total number of tokens, over all ranks, for exact computation of the noise floor."""
_FLOOR_ERROR = 1e-6
"""Tolerance of the exact noise floor. Its sum over peak loads ends once a higher peak is less probable than this."""
_PAID_ERRORS = 1.0
"""Number of standard errors that the mean gain of a change must exceed for the change to have paid off."""


def expected_loads(
    heat_NLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
) -> Float64:
    """Return the expected number of tokens on each rank, float64 ``[N, L, R]``; arguments as for ``split_shares``.

    Use it for episodes, which contain many tokens. If the host splits by step, each row is split optimally, into whole
    tokens if the heat has an integer type.
    """
    phy2log_LRS = placement.phy2log_LRS.copy()
    if split == STEP:
        return loads_by_step(as_kernel_heat(heat_NLE), phy2log_LRS, heat_NLE.dtype.kind in "iu")
    share_LP = split_shares(heat_NLE, placement, log2phy_RLE, source_RLE, split)
    return loads_of_ranks(as_kernel_heat(heat_NLE), phy2log_LRS, share_LP)


def split_loads(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    first_step: int = 0,
) -> Float64:
    """Return the number of whole tokens that each rank receives in each step, float64 ``[T, L, R]``.

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split
        As for ``split_shares``.
    first_step
        Number of the first step. A step's number determines its random split.
    """
    if split == STEP:
        return expected_loads(heat_TLE, placement, log2phy_RLE, source_RLE, split)
    host = host_split(heat_TLE, placement, log2phy_RLE, source_RLE, split)
    return _serve(heat_TLE, placement, host, first_step=first_step, keep_loads=True).loads_TKR


def _serve(
    heat_TLE: Heat,
    placement: Placement,
    host: HostSplit,
    layer_K: npt.NDArray[np.int64] | None = None,
    first_step: int = 0,
    curve: CostCurve | None = None,
    *,
    keep_loads: bool = False,
) -> ServedSteps:
    """Simulate serving each step in whole tokens with ``solver.whole_tokens.serve_steps``.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step.
    placement
        Placement of the K selected layers.
    host
        Split of the tokens in the selected layers.
    layer_K
        int64 ``[K]``, layers of ``heat_TLE`` to select; all by default.
    first_step
        Number of the first step.
    curve
        Cost curve; ``None`` to skip the computation of times.
    keep_loads
        True to return every rank's load in every step.
    """
    layer_K = np.arange(placement.layers) if layer_K is None else layer_K
    curve_4 = np.zeros(0) if curve is None else _numbers_of(curve)
    phy2log_KRS = placement.phy2log_LRS.copy()
    return serve_steps(as_kernel_heat(heat_TLE), layer_K, phy2log_KRS, host, curve_4, first_step, keep_loads)


def slowest_rank_us(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    curve: CostCurve,
    first_step: int = 0,
    layer_K: npt.NDArray[np.int64] | None = None,
) -> Float64:
    """Return the time of each layer's slowest rank in each step, in microseconds, float64 ``[T, L]``.

    The time is NaN for a step without tokens. It does not include the cost of splitting each step
    (``price.SplitCost``).

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K
        As for ``split_steps``.
    curve
        Cost curve.
    first_step
        As for ``split_loads``.
    """
    layer_K = np.arange(placement.layers) if layer_K is None else layer_K
    if split != STEP:
        host = host_split(heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K)
        served = _serve(heat_TLE, placement, host, layer_K, first_step, curve)
        by_batch_TK: Float64 = curve.batch_us * served.tokens_TK
        return served.us_TK + by_batch_TK
    heat_TKE = heat_TLE[:, layer_K]
    us_TK = np.full((len(heat_TKE), placement.layers), np.nan)
    for begin in range(0, len(heat_TKE), _CHUNK_STEPS):
        chunk = slice(begin, begin + _CHUNK_STEPS)
        tokens_TKRS = _stepwise_tokens(heat_TKE[chunk], placement)
        us_TK[chunk] = np.where(heat_TKE[chunk].any(axis=2), curve.slowest_us(tokens_TKRS), np.nan)
    return us_TK


def _stepwise_tokens(heat_TLE: Heat, placement: Placement) -> Float64:
    """Return the number of tokens in each slot if every row is split optimally, float64 ``[T, L, R, S]``.

    The numbers are whole if the heat has an integer type. ``slots_by_step`` documents which of the many optimal splits
    is used.
    """
    phy2log_LRS = placement.phy2log_LRS.copy()
    tokens_TLP = slots_by_step(as_kernel_heat(heat_TLE), phy2log_LRS, heat_TLE.dtype.kind in "iu")
    return tokens_TLP.reshape(len(heat_TLE), *phy2log_LRS.shape)


def _numbers_of(curve: CostCurve) -> Float64:
    """Return a cost curve in the form that the kernels expect.

    It omits ``batch_us``, which applies to the tokens of all ranks.
    """
    return np.array([curve.floor_us, curve.read_us, curve.launch_us, curve.slope_us])


@dataclass(frozen=True)
class ServedWindow:
    """Summary of a window's rank loads in K layers.

    A decision needs only these figures. The loads themselves would be millions of numbers.

    Parameters
    ----------
    peak_TK
        float64 ``[T, K]``, number of whole tokens on the most loaded rank.
    tokens_TK
        float64 ``[T, K]``, number of whole tokens on all ranks.
    variance_K
        float64 ``[K]``, variance of the jumps in the ranks' loads from step to step, as in ``EpisodeLoads``; 0 if the
        host splits by step.
    ranks
        R, number of ranks.
    loads_NKR
        Expected loads, as in ``EpisodeLoads``; no rows unless episodes were requested.
    rank_variance_K
        As in ``EpisodeLoads``; zeros unless episodes were requested.
    expert_variance_K
        As in ``EpisodeLoads``; zeros unless episodes were requested.
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
    """Summarise the loads that ``split_loads`` would return, without keeping them in memory.

    If the host splits by step, there are no episodes, because every step is balanced separately.

    Parameters
    ----------
    heat_TLE, placement, log2phy_RLE, source_RLE, split
        As for ``split_shares``. All except the heat contain only the K selected layers.
    episodes
        N, number of episodes into which the expected loads are summed; 0 for none.
    layer_K
        int64 ``[K]``, layers of ``heat_TLE`` to select; all by default.
    first_step
        As for ``split_loads``.
    """
    layer_K = np.arange(placement.layers) if layer_K is None else layer_K
    zeros_K = np.zeros(placement.layers)
    no_loads_NKR = np.zeros((0, placement.layers, placement.ranks))
    if split == STEP:
        loads_TKR = expected_loads(heat_TLE[:, layer_K], placement, log2phy_RLE, source_RLE, split)
        peak_TK = loads_TKR.max(axis=2)
        tokens_TK = loads_TKR.sum(axis=2)
        return ServedWindow(peak_TK, tokens_TK, zeros_K, placement.ranks, no_loads_NKR, zeros_K, zeros_K)
    host = host_split(heat_TLE, placement, log2phy_RLE, source_RLE, split, layer_K)
    served = _serve(heat_TLE, placement, host, layer_K, first_step)
    loads_NKR = no_loads_NKR
    rank_variance_K = zeros_K
    expert_variance_K = zeros_K
    if episodes:
        phy2log_KRS = placement.phy2log_LRS.copy()
        loads_NKR, rank_variance_K, expert_variance_K = episode_loads(
            as_kernel_heat(heat_TLE), layer_K, phy2log_KRS, host.share_KP, episodes
        )
    return ServedWindow(
        served.peak_TK,
        served.tokens_TK,
        served.variance_K,
        placement.ranks,
        loads_NKR,
        rank_variance_K,
        expert_variance_K,
    )


@dataclass(frozen=True)
class WindowSplit:
    """Placement with a precomputed split of tokens, used to score steps as they arrive.

    Parameters
    ----------
    placement
        Placement that serves the steps.
    host
        Split of the tokens over the replicas; ``None`` if the host splits each step according to its own counts.
    """

    placement: Placement
    host: HostSplit | None

    @classmethod
    def of(
        cls, heat_TLE: Heat, placement: Placement, log2phy_RLE: Int32, source_RLE: Float64 | None, split: str
    ) -> WindowSplit:
        """Compute the split from a window's heat; arguments as for ``split_shares``."""
        if split == STEP:
            return cls(placement, None)
        return cls(placement, host_split(heat_TLE, placement, log2phy_RLE, source_RLE, split))

    def par_of_steps(self, heat_TLE: Heat, first_step: int) -> Float64:
        """Return the peak-to-average ratio of each step, float64 ``[T, L]``; NaN if there are no tokens.

        ``first_step`` has the same meaning as for ``split_loads``.
        """
        if self.host is None:
            phy2log_LRS = self.placement.phy2log_LRS.copy()
            return step_par(loads_by_step(as_kernel_heat(heat_TLE), phy2log_LRS, heat_TLE.dtype.kind in "iu"))
        served = _serve(heat_TLE, self.placement, self.host, first_step=first_step)
        return peak_par(served.peak_TK, served.tokens_TK, self.placement.ranks)


def par_by_step(served: ServedWindow) -> Float64:
    """Return the peak-to-average ratio of each step, float64 ``[T, K]``; NaN if there are no tokens."""
    return peak_par(served.peak_TK, served.tokens_TK, served.ranks)


def drawn_par(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    layer_K: npt.NDArray[np.int64] | None = None,
) -> Float64:
    """Return the peak-to-average ratio of each step, averaged over several draws of its tokens, float64 ``[T, K]``.

    Use it for steps with few tokens, because with a single draw, the mean over a short window would depend on the
    random numbers. The arguments are the same as for ``split_steps``.
    """
    layout = placement, log2phy_RLE, source_RLE, split

    def par_of_draw(first_step: int) -> Float64:
        return par_by_step(split_steps(heat_TLE, *layout, layer_K=layer_K, first_step=first_step))

    return _mean_of_draws(par_of_draw, len(heat_TLE))


def drawn_us(
    heat_TLE: Heat,
    placement: Placement,
    log2phy_RLE: Int32,
    source_RLE: Float64 | None,
    split: str,
    curve: CostCurve,
    layer_K: npt.NDArray[np.int64] | None = None,
) -> Float64:
    """Return the time of each step, averaged over several draws as in ``drawn_par``.

    The arguments are the same as for ``slowest_rank_us``.
    """
    layout = placement, log2phy_RLE, source_RLE, split

    def us_of_draw(first_step: int) -> Float64:
        return slowest_rank_us(heat_TLE, *layout, curve, first_step, layer_K)

    return _mean_of_draws(us_of_draw, len(heat_TLE))


def _mean_of_draws(figure_of: Callable[[int], Float64], steps: int) -> Float64:
    """Return the mean of ``figure_of`` over several draws of ``steps`` steps.

    ``figure_of`` is called with the number of each draw's first step.
    """
    draws = int(np.clip(-(-_DRAWN_STEPS // max(steps, 1)), 1, _MAX_DRAWS))
    mean_TK: Float64 = np.mean([figure_of(draw * _DRAW_OFFSET) for draw in range(draws)], axis=0)
    return mean_TK


def par_of_steps(served: ServedWindow) -> Float64:
    """Return the mean peak-to-average ratio of the steps with tokens, float64 ``[K]``; NaN if no step has any."""
    return mean_par(par_by_step(served), axis=0)


def expected_hottest(ranks: int) -> float:
    """Return the expected maximum of ``ranks`` normal values, in standard deviations above their mean.

    References
    ----------
    G. Blom, *Statistical Estimates and Transformed Beta-Variables*, 1958.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def noise_floor(tokens_NL: Heat, ranks: int) -> Float64:
    """Return the expected peak-to-average ratio of perfectly balanced ranks if tokens choose experts independently.

    For small numbers of tokens, the result is exact, with whole tokens on every rank. For larger numbers, each rank's
    count is treated as Poisson-distributed, and the largest of R counts follows from Blom's normal score with the
    Cornish-Fisher skewness term. Real routers stay slightly below this floor.

    Parameters
    ----------
    tokens_NL
        ``[N, L]``, number of tokens in each step or episode, summed over all experts.
    ranks
        R, number of ranks.

    Returns
    -------
    Float64
        float64 ``[L]``, mean over the rows with tokens; NaN if no row has any.

    Examples
    --------
    A single token loads one of four ranks, which then has four times the mean load. The floor falls as tokens are
    added:

    >>> tokens_1L = np.array([[1, 8, 64, 1_000_000]])
    >>> noise_floor(tokens_1L, ranks=4).round(3)
    array([4.   , 1.769, 1.263, 1.002])
    """
    score = expected_hottest(ranks)
    mean_NL = tokens_NL / ranks
    busy_NL = mean_NL > 0
    safe_NL = np.where(busy_NL, mean_NL, 1.0)
    peak_NL = 1.0 + score / np.sqrt(safe_NL) + (score**2 - 1.0) / (6.0 * safe_NL)
    exact_F = _exact_floor(ranks)
    few_NL = busy_NL & (tokens_NL <= exact_F.size)
    # Token counts are fractional only in averaged heat. Interpolate between whole numbers of tokens.
    peak_NL[few_NL] = np.interp(tokens_NL[few_NL], np.arange(1, exact_F.size + 1), exact_F)
    return mean_par(np.where(busy_NL, np.clip(peak_NL, 1.0, ranks), np.nan), axis=0)


@cache
def _exact_floor(ranks: int) -> Float64:
    """Return the expected peak-to-average ratio for 1, 2, 3, ... tokens that choose ranks independently, ``[F]``.

    The probability that no rank receives more than ``m`` tokens is a ratio. Its numerator is the probability that R
    Poisson counts of at most ``m`` sum to the number of tokens. Its denominator is the same for unbounded counts.
    """
    max_tokens = min(_EXACT_TOKENS_PER_RANK * ranks, _MAX_EXACT_TOKENS)
    count_F = np.arange(max_tokens + 1)
    log_factorial_F = np.array([math.lgamma(count + 1) for count in count_F])
    mean = max_tokens / ranks
    one_rank_F = np.exp(count_F * math.log(mean) - mean - log_factorial_F)
    all_ranks_F = np.exp(count_F * math.log(max_tokens) - max_tokens - log_factorial_F)
    peak_F = np.zeros(max_tokens + 1)
    for bound in count_F:
        bounded_F = np.where(count_F <= bound, one_rank_F, 0.0)
        # Distribution of the sum of R bounded counts, by repeated squaring.
        sum_F = np.ones(1)
        for bit in bin(ranks)[2:]:
            sum_F = np.convolve(sum_F, sum_F)[: max_tokens + 1]
            if bit == "1":
                sum_F = np.convolve(sum_F, bounded_F)[: max_tokens + 1]
        above_F = 1.0 - np.minimum(sum_F / all_ranks_F, 1.0)
        peak_F += above_F
        if above_F.max() < _FLOOR_ERROR:
            break
    floor_F: Float64 = peak_F[1:] * ranks / count_F[1:]
    floor_F.setflags(write=False)
    return floor_F


def sampling_floor(served: ServedWindow) -> Float64:
    """Return the noise floor of the individual steps in a window, float64 ``[K]``.

    This is ``noise_floor``, reduced if the ranks' loads jump less between steps than they would with independent
    tokens. Real choices are not independent, because a token never chooses the same expert twice. The floor is at least
    the peak-to-average ratio of the most even split into whole tokens. If the host splits by step, only that lower
    bound applies.
    """
    ranks = served.ranks
    busy_TK = served.tokens_TK > 0
    tokens_TK = np.where(busy_TK, served.tokens_TK, 1.0)
    floor_K = noise_floor(served.tokens_TK, ranks)
    if len(tokens_TK) > 1:
        # Variance of the ranks' fractions of the tokens, summed over the ranks, if the tokens are independent.
        independent_K = mean_par(np.where(busy_TK, (1.0 - 1.0 / ranks) / tokens_TK, np.nan), axis=0)
        measured_K = np.ones_like(floor_K)
        np.divide(served.variance_K, independent_K, out=measured_K, where=independent_K > 0)
        floor_K = 1.0 + (floor_K - 1.0) * np.sqrt(np.minimum(measured_K, 1.0))
    whole_TK = np.where(busy_TK, np.ceil(tokens_TK / ranks) * ranks / tokens_TK, np.nan)
    return np.maximum(floor_K, mean_par(np.minimum(whole_TK, ranks), axis=0))


def volatility_bound(served: ServedWindow) -> Float64:
    """Return the peak-to-average ratio caused by jumps in the heat if ranks are balanced on average, ``[L]``.

    Jumps are measured between consecutive episodes, so a trend or a slow change in the workload does not count. Two
    estimates of their variance are compared, the sum over the experts and the variance measured on the ranks, and the
    smaller one is used. The measured variance is smaller if the experts' jumps partly cancel out: a token that chooses
    one expert does not choose another. The result is 1.0 if fewer than two episodes have tokens.
    """
    variance_L = np.minimum(served.expert_variance_K, served.rank_variance_K)
    return balanced_par(variance_L, served.ranks)


def balanced_par(variance_L: Float64, ranks: int) -> Float64:
    """Return the peak-to-average ratio of ranks that are balanced on average, float64 ``[L]``.

    ``variance_L`` is the variance of the ranks' fractions of the tokens, summed over the ranks.
    """
    # Each rank has 1/R of the summed variance. Dividing its fraction of the tokens by the mean fraction 1/R scales the
    # variance by R squared.
    bound_L: Float64 = 1.0 + expected_hottest(ranks) * np.sqrt(variance_L * ranks)
    return bound_L


@dataclass(frozen=True)
class Gain:
    """Mean gain per step with its 95 % interval, in the unit of the compared values; NaN if there are no values.

    Parameters
    ----------
    mean
        Mean over the steps.
    low
        Lower end of the interval.
    high
        Upper end of the interval.
    error
        Standard error of the mean; infinite if there are too few steps.
    """

    mean: float
    low: float
    high: float
    error: float

    @property
    def known(self) -> bool:
        """True if there were enough steps for an interval."""
        return math.isfinite(self.mean) and math.isfinite(self.error)

    @property
    def paid(self) -> bool | None:
        """True if the mean exceeds its standard error; ``None`` if there were too few steps."""
        return self.mean > _PAID_ERRORS * self.error if self.known else None


def gain_of(
    before_TL: Float64, after_TL: Float64, horizon: float | None = None, misses: Sequence[float] = ()
) -> Gain:
    """Return the mean gain of ``after_TL`` over ``before_TL``, averaged over the layers.

    The interval accounts for the correlation between consecutive steps (``solver.window.standard_error``).

    Parameters
    ----------
    before_TL
        float64 ``[T, L]``, ratios or times of the steps; NaN if there are no tokens.
    after_TL
        float64 ``[T, L]``, ratios or times of the same steps after the change; NaN if there are no tokens.
    horizon
        Number of future steps whose mean gain the interval must cover. Their mean varies as well, so the interval is
        wider. ``None`` for a confidence interval of the given steps' mean.
    misses
        Absolute errors of recent forecasts. The interval extends at least as far as the largest one, because future
        steps may change in ways that the given steps do not show.

    Examples
    --------
    >>> before_TL = np.array([[1.5], [1.6], [1.5], [1.6]])
    >>> after_TL = np.array([[1.2], [1.2], [1.3], [1.3]])
    >>> gain = gain_of(before_TL, after_TL)
    >>> round(gain.mean, 3), round(gain.low, 3), round(gain.high, 3)
    (0.3, 0.22, 0.38)
    >>> gain.paid
    True
    """
    gain_T = mean_par(before_TL - after_TL, axis=1)
    gain_T = gain_T[~np.isnan(gain_T)]
    if not gain_T.size:
        return Gain(math.nan, math.nan, math.nan, math.inf)
    mean = float(gain_T.mean())
    error = standard_error(gain_T)
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    half = gain_T.size // 2
    reach = z * error
    if horizon is not None and half:
        # Bartlett's estimate of the correlation between consecutive steps is itself uncertain and tends to be too low.
        reach *= math.sqrt((1.0 + gain_T.size / horizon) * (1.0 + inflation_error(gain_T.size)))
        # A change between the two halves may continue as in a random walk.
        drift = float(gain_T[half:].mean() - gain_T[:half].mean())
        reach = math.hypot(reach, z * drift * math.sqrt(1.0 + horizon / gain_T.size))
    reach = max([reach, *misses])
    return Gain(mean, mean - reach, mean + reach, error)
