"""Dealing tables in the planner: how many entries they have, and how many tokens each entry gets.

A source's tokens go to the entries of its table in turn, from the first one on in each step. So where a step brings
an expert many tokens, entries get nearly the same; where it brings one or two, the first entries get nearly all.
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
"""Mean tokens of a step at which the grid of means begins."""
_GRID = 96
"""Means between which the parts of entries are interpolated."""


def width_in_use(settings: PlannerSettings, log2phy_RLE: Int32) -> int:
    """Entries of the tables to be made for a host whose tables are like these: the most that divide its own."""
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
    """Tables of a placement on a host that splits as ``split`` before anybody gave it any, int32 ``[R, L, E]``.

    ``[R, L, E, D]`` where it deals.
    """
    return placement.default_log2phy(deal_width if split == DEAL else 1)


def as_host_deals(log2phy_RE: Int32, width: int) -> Int32:
    """A layer's tables with as many entries as the host has, a multiple of theirs."""
    axes = log2phy_RE.ndim if width == 1 else 2
    table = with_entries(log2phy_RE, axes)
    return without_single_entries(np.tile(table, (1,) * axes + (width // table.shape[-1],)))


def sources_of_tables(log2phy_GLE: Int32, width: int) -> Int32:
    """Each of the first ``width`` entries of each table as a source of its own, int32 ``[L, V, E]``.

    Entry ``k`` of source ``g`` is the source ``g*width + k``.
    """
    entry_GLED = with_entries(log2phy_GLE, 3)[..., :width]
    groups, layers, experts, _ = entry_GLED.shape
    return np.ascontiguousarray(entry_GLED.transpose(1, 0, 3, 2)).reshape(layers, groups * width, experts)


def tables_of_sources(log2phy_VE: Int32, groups: int) -> Int32:
    """The tables of ``groups`` sources, int32 ``[G, E]``, or ``[G, E, D]`` where each has several entries."""
    entry_GDE = log2phy_VE.reshape(groups, -1, log2phy_VE.shape[1])
    return np.ascontiguousarray(without_single_entries(entry_GDE.transpose(0, 2, 1)))


def entry_parts(tokens_X: Float64, width: int) -> Float64:
    """The part of its tokens that each entry is expected to get, float64 ``[..., D]``, summing to 1.

    Parameters
    ----------
    tokens_X
        float64 ``[...]``, tokens that a source sends to an expert in a step, the mean; in any one step their number is
        taken to be Poisson.
    width
        D.
    """
    if width == 1:
        return np.ones((*tokens_X.shape, 1))
    inverse_U, parts_UD = _parts_by_mean(width)
    # The place on the grid is found once for all entries.
    place_X = np.interp(1.0 / np.maximum(tokens_X, _MIN_TOKENS), inverse_U, np.arange(len(inverse_U)))
    below_X = np.minimum(place_X.astype(np.intp), len(inverse_U) - 2)
    found_XD: Float64 = parts_UD.take(below_X, axis=0)
    found_XD += (place_X - below_X)[..., None] * np.diff(parts_UD, axis=0).take(below_X, axis=0)
    return found_XD


def shares_of_entries(share_GLE: Float64, tokens_LE: Float64, width: int) -> Float64:
    """Each entry's part of each expert's tokens, float64 ``[L, V, E]``.

    ``share_GLE`` float64 ``[G, L, E]`` is each source's part, ``tokens_LE`` float64 ``[L, E]`` the tokens of a step.
    """
    groups, layers, experts = share_GLE.shape
    if width == 1:
        share_LGE: Float64 = share_GLE.transpose(1, 0, 2)
        return share_LGE
    share_GLED = share_GLE[..., None] * entry_parts(share_GLE * tokens_LE, width)
    return np.ascontiguousarray(share_GLED.transpose(1, 0, 3, 2)).reshape(layers, groups * width, experts)


@cache
def _parts_by_mean(width: int) -> tuple[Float64, Float64]:
    """Inverses of means in order, and the parts at each, float64 ``[U]`` and ``[U, D]``.

    Entry ``k`` gets a token whenever there are more than ``k``, more than ``k + D``, and so on. Of infinitely many
    tokens all entries get the same, and towards that parts are linear in the inverse.
    """
    mean_U = np.geomspace(width * width, _MIN_TOKENS, _GRID)
    more_UC = poisson_above(int(mean_U[0] + 12 * width + 24), mean_U)
    parts_UD = np.stack([more_UC[:, entry::width].sum(axis=1) for entry in range(width)], axis=1)
    parts_UD = np.vstack([np.ones(width), parts_UD])
    parts_UD /= parts_UD.sum(axis=1, keepdims=True)
    parts_UD.setflags(write=False)
    return np.append(0.0, 1.0 / mean_U), parts_UD


def poisson_above(counts: int, mean_U: Float64) -> Float64:
    """Return the probability that a Poisson number exceeds 0, 1, ... ``counts - 1`` at each mean, ``[U, C]``."""
    # Beyond this no probability is left that a float64 sum near 1 could hold.
    most = max(counts, int(mean_U.max() + 12 * np.sqrt(mean_U.max()))) + 24
    number_C = np.arange(most)
    log_factorial_C = np.append(0.0, np.cumsum(np.log(number_C[1:])))
    exactly_UC = np.exp(number_C * np.log(mean_U)[:, None] - mean_U[:, None] - log_factorial_C)
    # Summed from the smallest on, so that the tail keeps its digits.
    at_least_UC = np.cumsum(exactly_UC[:, ::-1], axis=1)[:, ::-1]
    above_UC: Float64 = at_least_UC[:, 1 : counts + 1]
    return above_UC
