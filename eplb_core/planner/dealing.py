"""Dealing tables in the planner: the number of entries, and the expected share of tokens that each entry receives.

A source sends its tokens for an expert to the entries of its table in turn, starting with the first entry in every
step. If a step has many tokens for an expert, the entries receive nearly equal numbers of tokens. If it has only one or
two, the first entries receive nearly all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from eplb_core.placement import (
    Float64,
    Int32,
    Placement,
    default_log2phy,
    with_entries,
    without_single_entries,
)
from eplb_core.planner.settings import DEAL, EVEN, STEP, TABLES, PlannerSettings

_MIN_TOKENS = 1e-3
"""Smallest mean number of tokens per step on the interpolation grid."""
_GRID_MEANS = 96
"""Number of points on the grid from which the entries' shares are interpolated."""


def width_in_use(settings: PlannerSettings, log2phy_RLE: Int32) -> int:
    """Return the number of entries per expert in planned tables, for a host with tables like ``log2phy_RLE``.

    This is the largest divisor of the host's table width that does not exceed ``deal_width``, or 1 if the host does not
    deal.
    """
    width = with_entries(log2phy_RLE, 3).shape[3]
    if settings.split != DEAL:
        return 1
    return max(entries for entries in range(1, settings.deal_width + 1) if width % entries == 0)


def fitted_to_host(
    settings: PlannerSettings, width: int, *, entry_by_row: bool, splits_by_step: bool = False
) -> PlannerSettings:
    """Adapt the settings to a host whose tables have ``width`` entries per expert.

    The default split ``tables`` is replaced by ``step`` if the host splits each step according to the step's counts. On
    a host with several entries per expert, ``tables`` would use only one replica of each expert per source. It is then
    replaced by ``even`` if the host picks an entry based on the token's row, and by ``deal`` otherwise. Any other split
    is kept.
    """
    if settings.split != TABLES or (width == 1 and not splits_by_step):
        return settings
    if splits_by_step:
        return replace(settings, split=STEP)
    return replace(settings, split=EVEN if entry_by_row else DEAL)


def host_tables(log2phy_RE: Int32, phy2log_RS: Int32, width: int, split: str, first_R: Int32) -> Int32:
    """Return a layer's tables with the ``width`` entries that the host reads, int32 ``[R, E]`` or ``[R, E, D]``.

    The planned entries ``log2phy_RE`` are repeated up to ``width``. If ``split`` is ``even``, the entries instead cycle
    through all replicas in the placement ``phy2log_RS``, and all ranks of a token group share the table of the group's
    first rank. ``first_R`` maps each rank to that first rank.
    """
    if split == EVEN and width > 1:
        return default_log2phy(phy2log_RS, log2phy_RE.shape[1], width)[first_R]
    return as_host_deals(log2phy_RE, width)


def default_tables(placement: Placement, split: str, deal_width: int) -> Int32:
    """Return the default tables for a placement, int32 ``[R, L, E]``, or ``[R, L, E, D]`` for a host that deals."""
    return placement.default_log2phy(deal_width if split == DEAL else 1)


def as_host_deals(log2phy_RE: Int32, width: int) -> Int32:
    """Repeat the entries of a layer's tables up to ``width``, which must be a multiple of the number of entries."""
    axes = log2phy_RE.ndim if width == 1 else 2
    table = with_entries(log2phy_RE, axes)
    return without_single_entries(np.tile(table, (1,) * axes + (width // table.shape[-1],)))


def sources_of_tables(log2phy_GLE: Int32, width: int) -> Int32:
    """Convert the first ``width`` entries of each table to separate sources, int32 ``[L, V, E]``.

    The solver supports only sources with one entry per expert. Entry ``k`` of source ``g`` becomes source
    ``g*width + k``.

    Examples
    --------
    Two sources each deal the tokens of a single expert, in one layer, to two slots:

    >>> log2phy_GLED = np.array([[[[0, 3]]], [[[3, 0]]]], dtype=np.int32)
    >>> sources_of_tables(log2phy_GLED, 2).tolist()
    [[[0], [3], [3], [0]]]
    >>> tables_of_sources(sources_of_tables(log2phy_GLED, 2)[0], groups=2).tolist()
    [[[0, 3]], [[3, 0]]]
    """
    entry_GLED = with_entries(log2phy_GLE, 3)[..., :width]
    groups, layers, experts, _ = entry_GLED.shape
    return np.ascontiguousarray(entry_GLED.transpose(1, 0, 3, 2)).reshape(layers, groups * width, experts)


def tables_of_sources(log2phy_VE: Int32, groups: int) -> Int32:
    """Convert one layer's sources back to the tables of ``groups`` groups, the inverse of ``sources_of_tables``.

    The tables are int32 ``[G, E]``, or ``[G, E, D]`` if there are several entries per expert.
    """
    entry_GDE = log2phy_VE.reshape(groups, -1, log2phy_VE.shape[1])
    return np.ascontiguousarray(without_single_entries(entry_GDE.transpose(0, 2, 1)))


def entry_parts(tokens_X: Float64, width: int) -> Float64:
    """Return the expected share of a source's tokens that each table entry receives.

    Parameters
    ----------
    tokens_X
        float64 ``[...]``, mean number of tokens per step that a source sends to an expert. The number in a single step
        is assumed to be Poisson-distributed.
    width
        D, number of entries.

    Returns
    -------
    Float64
        float64 ``[..., D]``, summing to 1 over the entries.

    Examples
    --------
    With one token in ten steps, nearly all tokens go to the first entry. With 100 tokens per step, the entries receive
    nearly equal shares:

    >>> entry_parts(np.array([0.1, 100.0]), width=2).round(3)
    array([[0.953, 0.047],
           [0.502, 0.498]])
    """
    if width == 1:
        return np.ones((*tokens_X.shape, 1))
    inverse_U, shares_UD = _shares_by_mean(width)
    # All entries share the same grid position, so compute it only once.
    position_X = np.interp(1.0 / np.maximum(tokens_X, _MIN_TOKENS), inverse_U, np.arange(len(inverse_U)))
    below_X = np.minimum(position_X.astype(np.intp), len(inverse_U) - 2)
    share_XD: Float64 = shares_UD.take(below_X, axis=0)
    share_XD += (position_X - below_X)[..., None] * np.diff(shares_UD, axis=0).take(below_X, axis=0)
    return share_XD


def shares_of_entries(share_GLE: Float64, tokens_LE: Float64, width: int) -> Float64:
    """Return each entry's share of each expert's tokens, treating every entry as a separate source.

    Parameters
    ----------
    share_GLE
        float64 ``[G, L, E]``, each source's share of each expert's tokens.
    tokens_LE
        float64 ``[L, E]``, tokens per step and expert, summed over all sources.
    width
        D, number of entries.

    Returns
    -------
    Float64
        float64 ``[L, V, E]``, in the order of ``sources_of_tables``.
    """
    groups, layers, experts = share_GLE.shape
    if width == 1:
        share_LGE: Float64 = share_GLE.transpose(1, 0, 2)
        return share_LGE
    share_GLED = share_GLE[..., None] * entry_parts(share_GLE * tokens_LE, width)
    return np.ascontiguousarray(share_GLED.transpose(1, 0, 3, 2)).reshape(layers, groups * width, experts)


@cache
def _shares_by_mean(width: int) -> tuple[Float64, Float64]:
    """Return the entries' shares on a grid of mean token counts.

    Entry ``k`` receives one token if there are more than ``k`` tokens, a second one if there are more than ``k + D``,
    and so on. As the mean grows, all shares become equal. Close to that limit they are linear in the inverse of the
    mean, so the grid is indexed by that inverse.

    Returns
    -------
    inverse_U : Float64
        float64 ``[U]``, inverses of the means in ascending order, starting at 0.
    shares_UD : Float64
        float64 ``[U, D]``, share of each entry at each mean.
    """
    mean_U = np.geomspace(width * width, _MIN_TOKENS, _GRID_MEANS)
    above_UC = poisson_above(int(mean_U[0] + 12 * width + 24), mean_U)
    shares_UD = np.stack([above_UC[:, entry::width].sum(axis=1) for entry in range(width)], axis=1)
    shares_UD = np.vstack([np.ones(width), shares_UD])
    shares_UD /= shares_UD.sum(axis=1, keepdims=True)
    shares_UD.setflags(write=False)
    return np.append(0.0, 1.0 / mean_U), shares_UD


def poisson_above(counts: int, mean_U: Float64) -> Float64:
    """Return the probability that a Poisson variable exceeds 0, 1, ..., ``counts - 1``, for each mean, ``[U, C]``."""
    # Include every count whose probability is large enough to affect a float64 sum near 1.
    terms = max(counts, int(mean_U.max() + 12 * np.sqrt(mean_U.max()))) + 24
    number_C = np.arange(terms)
    log_factorial_C = np.append(0.0, np.cumsum(np.log(number_C[1:])))
    exactly_UC = np.exp(number_C * np.log(mean_U)[:, None] - mean_U[:, None] - log_factorial_C)
    # Sum in order of increasing probability to preserve the precision of the tail.
    at_least_UC = np.cumsum(exactly_UC[:, ::-1], axis=1)[:, ::-1]
    above_UC: Float64 = at_least_UC[:, 1 : counts + 1]
    return above_UC
