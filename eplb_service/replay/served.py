"""Rank loads and times over a trace under a given layout.

If the trace records each step's tokens by source rank, they are routed through their source ranks' tables.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve
from eplb_core.heat.window import Counts
from eplb_core.placement import Float64, dealt_to, with_entries
from eplb_core.planner.plan import Layout
from eplb_core.planner.score import slowest_rank_us, split_loads
from eplb_core.planner.settings import EVEN, STEP
from eplb_service.io.containers import Array
from eplb_service.io.trace import Trace

_STEPS_READ = 8
"""Number of steps whose source heat is read at a time. In a large deployment, source heat takes megabytes per step."""


def served_loads(trace: Trace, heat_TLE: Counts, first: int, serving: Layout, split: str) -> Float64:
    """Return the tokens that each rank receives in a range of a trace's steps, float64 ``[t, L, R]``.

    If the trace has as many source ranks as the placement has ranks, each token goes to the slot given by its source
    rank's table, and the entries of dealing tables are used in turn. Otherwise, each token's source is drawn uniformly
    from all ranks. Hosts with the split ``even`` or ``step`` use no tables. Token counts remain integers.

    Parameters
    ----------
    trace
        The trace, which may record source ranks.
    heat_TLE
        ``[t, L, E]``, heat of the steps.
    first
        Index in the trace of the first of these steps.
    serving
        Layout in effect during the steps.
    split
        The host's split of tokens over replicas; one of ``settings.SPLITS``.
    """
    placement = serving.placement
    if split in (EVEN, STEP) or not has_step_sources(trace, placement.ranks):
        return split_loads(heat_TLE, placement, serving.log2phy_RLE, None, split, first)
    destination_RLED = with_entries(serving.log2phy_RLE // placement.slots, 3)
    return np.concatenate(
        [
            _dealt_loads(source_TRLE, destination_RLED, placement.ranks)
            for source_TRLE in _sources(trace, first, first + len(heat_TLE))
        ]
    )


def served_us(
    trace: Trace, heat_TLE: Counts, first: int, serving: Layout, split: str, curve: CostCurve
) -> Float64:
    """Return the time of each layer's slowest rank in a range of a trace's steps, float64 ``[t, L]`` in microseconds.

    The time is NaN for a layer without tokens. It does not include the computation of a stepwise split.

    Parameters
    ----------
    trace, heat_TLE, first, serving, split
        As for ``served_loads``.
    curve
        Cost curve of the ranks.
    """
    placement = serving.placement
    if split in (EVEN, STEP) or not has_step_sources(trace, placement.ranks):
        return slowest_rank_us(heat_TLE, placement, serving.log2phy_RLE, None, split, curve, first)
    slot_RLED = with_entries(serving.log2phy_RLE, 3)
    chunks = []
    for source_TRLE in _sources(trace, first, first + len(heat_TLE)):
        tokens_TLP = _dealt_loads(source_TRLE, slot_RLED, placement.ranks * placement.slots)
        tokens_TLRS = tokens_TLP.reshape(*tokens_TLP.shape[:2], placement.ranks, placement.slots)
        chunks.append(np.where(tokens_TLP.any(axis=2), curve.slowest_us(tokens_TLRS), np.nan))
    return np.concatenate(chunks)


def has_step_sources(trace: Trace, ranks: int) -> bool:
    """Return True if the trace records each step's tokens by source rank, for this number of ranks."""
    return trace.facts.ranks == ranks and trace.source_rows(0, 1) is not None


def _sources(trace: Trace, first: int, end: int) -> Iterator[Array]:
    """Iterate over the tokens by source rank, ``[t, R, L, E]``, a few steps at a time."""
    for begin in range(first, end, _STEPS_READ):
        source_TRLE = trace.source_rows(begin, min(begin + _STEPS_READ, end))
        assert source_TRLE is not None
        yield source_TRLE


def _dealt_loads(source_TRLE: Array, destination_RLED: npt.NDArray[np.integer], destinations: int) -> Float64:
    """Compute the loads like ``_loads_from_sources``, but with each source rank using its D entries in turn."""
    width = destination_RLED.shape[3]
    loads = [
        _loads_from_sources(dealt_to(source_TRLE, entry, width), destination_RLED[..., entry], destinations)
        for entry in range(width)
    ]
    total_TLX: Float64 = np.sum(loads, axis=0)
    return total_TLX


def _loads_from_sources(
    source_TRLE: Array, destination_RLE: npt.NDArray[np.integer], destinations: int
) -> Float64:
    """Return the tokens that each destination receives, float64 ``[T, L, X]``.

    Parameters
    ----------
    source_TRLE
        ``[T, R, L, E]``, tokens by source rank.
    destination_RLE
        ``[R, L, E]``, destination of the tokens that each source rank sends to each expert.
    destinations
        X, number of destinations.
    """
    steps, _, layers, _ = source_TRLE.shape
    loads_TLX = np.zeros((steps, layers, destinations))
    for layer in range(layers):
        destination_P = destination_RLE[:, layer].ravel()
        order_P = np.argsort(destination_P, kind="stable")
        first_D = np.flatnonzero(np.diff(destination_P[order_P], prepend=-1))
        sent_TP = source_TRLE[:, :, layer].reshape(steps, -1)[:, order_P]
        reached_D = destination_P[order_P][first_D]
        loads_TLX[:, layer, reached_D] = np.add.reduceat(sent_TP, first_D, axis=1, dtype=np.float64)
    return loads_TLX
