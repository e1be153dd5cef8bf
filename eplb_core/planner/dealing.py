"""Dealing tables in the planner: how many entries they have, and how many tokens each entry receives.

A source sends its tokens of an expert to the entries of its table in turn, starting from the first entry in each step.
If a step has many tokens for an expert, its entries receive nearly the same number. If it has only one or two, the
first entries receive nearly all.
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
from eplb_core.planner.settings import DEAL, EVEN, TABLES, PlannerSettings

_MIN_TOKENS = 1e-3
"""Smallest mean number of tokens per step on the grid of means."""
_GRID_MEANS = 96
"""Number of means on the grid that the entries' shares are interpolated on."""


def width_in_use(settings: PlannerSettings, log2phy_RLE: Int32) -> int:
    """Return the number of entries that planned tables have on a host whose tables are like ``log2phy_RLE``.

    It is the largest divisor of the host's width that ``deal_width`` allows, or 1 if the host does not deal.
    """
    width = with_entries(log2phy_RLE, 3).shape[3]
    if settings.split != DEAL:
        return 1
    return max(entries for entries in range(1, settings.deal_width + 1) if width % entries == 0)


def fitted_to_host(settings: PlannerSettings, width: int, *, entry_by_row: bool) -> PlannerSettings:
    """Return the settings for a host whose tables have ``width`` entries.

    The default split, ``tables``, would use only one replica of each expert on such a host. It becomes ``even`` if the
    host picks an entry by a token's row, and ``deal`` otherwise. A split that the user chose is kept.
    """
    if width == 1 or settings.split != TABLES:
        return settings
    return replace(settings, split=EVEN if entry_by_row else DEAL)


def host_tables(log2phy_RE: Int32, phy2log_RS: Int32, width: int, split: str, first_R: Int32) -> Int32:
    """Return a layer's tables with the ``width`` entries that the host reads, int32 ``[R, E]`` or ``[R, E, D]``.

    Repeats the planned entries ``log2phy_RE``. If ``split`` is even, the entries cycle through all replicas of the
    placement ``phy2log_RS``. All ranks of a token group then get the table of its first rank, which ``first_R`` holds
    for each rank.
    """
    if split == EVEN and width > 1:
        return default_log2phy(phy2log_RS, log2phy_RE.shape[1], width)[first_R]
    return as_host_deals(log2phy_RE, width)


def first_tables(placement: Placement, split: str, deal_width: int) -> Int32:
    """Return the default tables of a placement, int32 ``[R, L, E]``, or ``[R, L, E, D]`` for a host that deals."""
    return placement.default_log2phy(deal_width if split == DEAL else 1)


def as_host_deals(log2phy_RE: Int32, width: int) -> Int32:
    """Return a layer's tables with their entries repeated up to ``width``, which must be a multiple of their number."""
    axes = log2phy_RE.ndim if width == 1 else 2
    table = with_entries(log2phy_RE, axes)
    return without_single_entries(np.tile(table, (1,) * axes + (width // table.shape[-1],)))


def sources_of_tables(log2phy_GLE: Int32, width: int) -> Int32:
    """Return each of the first ``width`` entries of each table as a separate source, int32 ``[L, V, E]``.

    The solver knows only sources with one entry per expert. Entry ``k`` of source ``g`` becomes source ``g*width + k``.

    Examples
    --------
    Two sources, one layer and one expert, whose tokens each source deals to two slots:

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
    """Return one layer's tables of ``groups`` sources, the inverse of ``sources_of_tables``.

    They are int32 ``[G, E]``, or ``[G, E, D]`` if each source has several entries.
    """
    entry_GDE = log2phy_VE.reshape(groups, -1, log2phy_VE.shape[1])
    return np.ascontiguousarray(without_single_entries(entry_GDE.transpose(0, 2, 1)))


def entry_parts(tokens_X: Float64, width: int) -> Float64:
    """Return the share of a source's tokens that each entry is expected to receive.

    Parameters
    ----------
    tokens_X
        float64 ``[...]``, mean number of tokens per step that a source sends to an expert. The number in a single step
        is assumed to be Poisson.
    width
        D, number of entries.

    Returns
    -------
    Float64
        float64 ``[..., D]``, summing to 1 over the entries.

    Examples
    --------
    With one token in ten steps nearly all go to the first entry. With 100 tokens per step the entries receive nearly
    the same number:

    >>> entry_parts(np.array([0.1, 100.0]), width=2).round(3)
    array([[0.953, 0.047],
           [0.502, 0.498]])
    """
    if width == 1:
        return np.ones((*tokens_X.shape, 1))
    inverse_U, shares_UD = _shares_by_mean(width)
    # Interpolate the position on the grid once for all entries.
    position_X = np.interp(1.0 / np.maximum(tokens_X, _MIN_TOKENS), inverse_U, np.arange(len(inverse_U)))
    below_X = np.minimum(position_X.astype(np.intp), len(inverse_U) - 2)
    share_XD: Float64 = shares_UD.take(below_X, axis=0)
    share_XD += (position_X - below_X)[..., None] * np.diff(shares_UD, axis=0).take(below_X, axis=0)
    return share_XD


def shares_of_entries(share_GLE: Float64, tokens_LE: Float64, width: int) -> Float64:
    """Return each entry's share of each expert's tokens, with every entry as a separate source.

    Parameters
    ----------
    share_GLE
        float64 ``[G, L, E]``, each source's share of each expert's tokens.
    tokens_LE
        float64 ``[L, E]``, tokens of each expert per step, from all sources.
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
    """Return the entries' shares for a grid of means.

    Entry ``k`` receives a token if there are more than ``k`` tokens, another if there are more than ``k + D``, and so
    on. With infinitely many tokens all shares are equal. Close to that limit they are linear in the inverse of the
    mean, so they are tabulated by that inverse.

    Returns
    -------
    inverse_U : Float64
        float64 ``[U]``, inverse of each mean in ascending order, starting with 0.
    shares_UD : Float64
        float64 ``[U, D]``, shares of the entries at each mean.
    """
    mean_U = np.geomspace(width * width, _MIN_TOKENS, _GRID_MEANS)
    above_UC = poisson_above(int(mean_U[0] + 12 * width + 24), mean_U)
    shares_UD = np.stack([above_UC[:, entry::width].sum(axis=1) for entry in range(width)], axis=1)
    shares_UD = np.vstack([np.ones(width), shares_UD])
    shares_UD /= shares_UD.sum(axis=1, keepdims=True)
    shares_UD.setflags(write=False)
    return np.append(0.0, 1.0 / mean_U), shares_UD


def poisson_above(counts: int, mean_U: Float64) -> Float64:
    """Return the probability that a Poisson number exceeds 0, 1, ..., ``counts - 1`` at each mean, ``[U, C]``."""
    # Include all counts whose probability is not lost to rounding in a float64 sum near 1.
    terms = max(counts, int(mean_U.max() + 12 * np.sqrt(mean_U.max()))) + 24
    number_C = np.arange(terms)
    log_factorial_C = np.append(0.0, np.cumsum(np.log(number_C[1:])))
    exactly_UC = np.exp(number_C * np.log(mean_U)[:, None] - mean_U[:, None] - log_factorial_C)
    # Sum from the smallest probability up, so that the tail keeps its precision.
    at_least_UC = np.cumsum(exactly_UC[:, ::-1], axis=1)[:, ::-1]
    above_UC: Float64 = at_least_UC[:, 1 : counts + 1]
    return above_UC
