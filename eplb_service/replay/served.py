"""Loads that ranks receive along a trace: each step's tokens, through the tables of the ranks that they come from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve
from eplb_core.heat.window import Counts
from eplb_core.placement import Float64, dealt_to, with_entries
from eplb_core.planner.plan import Layout
from eplb_core.planner.score import split_loads, split_us
from eplb_core.planner.settings import EVEN, STEP
from eplb_service.io.containers import Array
from eplb_service.io.trace import Trace

_STEPS_READ = 8
"""Steps whose tokens by source rank are held at a time: a step of a large deployment has megabytes of them."""


def served_loads(trace: Trace, heat_TLE: Counts, first: int, serving: Layout, split: str) -> Float64:
    """Return the tokens that each rank receives in the steps from ``first`` on, float64 ``[t, L, R]``.

    If the trace has as many source ranks as the placement, each token goes to the slot that its source rank's table
    names. Tables that deal use their entries in turn. Otherwise, each token's source is drawn uniformly from all
    ranks. A host that splits as ``even`` or ``step`` uses no tables (see ``PlannerSettings.split``).
    Tokens stay whole.

    Parameters
    ----------
    trace
        What was recorded, source ranks among it.
    heat_TLE, first
        Its heat by logical expert, ``[t, L, E]``, from step ``first`` on.
    serving
        Placement and tables; several entries where they deal.
    split
        Split of tokens over replicas by the host.
    """
    placement, log2phy_RLE = serving.placement, serving.log2phy_RLE
    if split in (EVEN, STEP) or not knows_sources(trace, placement.ranks):
        return split_loads(heat_TLE, placement, log2phy_RLE, None, split, first)
    destination_RLED = with_entries(log2phy_RLE // placement.slots, 3)
    return np.concatenate(
        [
            _dealt_loads(source_TRLE, destination_RLED, placement.ranks)
            for source_TRLE in _sources(trace, first, first + len(heat_TLE))
        ]
    )


def served_us(
    trace: Trace, heat_TLE: Counts, first: int, serving: Layout, split: str, curve: CostCurve
) -> Float64:
    """Microseconds of each layer's slowest rank in the steps from ``first`` on, float64 ``[t, L]``.

    NaN where a layer has no tokens. What a stepwise split itself takes is left out.

    Parameters
    ----------
    trace, heat_TLE, first, serving, split
        As for ``served_loads``.
    curve
        Cost of tokens.
    """
    placement, log2phy_RLE = serving.placement, serving.log2phy_RLE
    if split in (EVEN, STEP) or not knows_sources(trace, placement.ranks):
        return split_us(heat_TLE, placement, log2phy_RLE, None, split, curve, first)
    slot_RLED = with_entries(log2phy_RLE, 3)
    parts = []
    for source_TRLE in _sources(trace, first, first + len(heat_TLE)):
        tokens_TLP = _dealt_loads(source_TRLE, slot_RLED, placement.ranks * placement.slots)
        tokens_TLRS = tokens_TLP.reshape(*tokens_TLP.shape[:2], placement.ranks, placement.slots)
        parts.append(np.where(tokens_TLP.any(axis=2), curve.slowest_us(tokens_TLRS), np.nan))
    return np.concatenate(parts)


def _sources(trace: Trace, first: int, end: int) -> Iterator[Array]:
    """Tokens by source rank, ``[t, R, L, E]``, a few steps at a time."""
    for begin in range(first, end, _STEPS_READ):
        source_TRLE = trace.source_rows(begin, min(begin + _STEPS_READ, end))
        assert source_TRLE is not None
        yield source_TRLE


def knows_sources(trace: Trace, ranks: int) -> bool:
    """Return True if the trace has each step's tokens by source rank, for this number of ranks."""
    return trace.facts.ranks == ranks and trace.source_rows(0, 1) is not None


def _dealt_loads(source_TRLE: Array, destination_RLED: npt.NDArray[np.integer], destinations: int) -> Float64:
    """``_loads_from_sources`` where each source's tokens go to the entries of ``destination_RLED`` in turn."""
    width = destination_RLED.shape[3]
    loads = (
        _loads_from_sources(dealt_to(source_TRLE, entry, width), destination_RLED[..., entry], destinations)
        for entry in range(width)
    )
    total_TLX: Float64 = np.sum(list(loads), axis=0)
    return total_TLX


def _loads_from_sources(
    source_TRLE: Array, destination_RLE: npt.NDArray[np.integer], destinations: int
) -> Float64:
    """Tokens by where they go, float64 ``[T, L, destinations]``, each going to ``destination_RLE`` of its source."""
    steps, _, layers, _ = source_TRLE.shape
    loads_TLR = np.zeros((steps, layers, destinations))
    for layer in range(layers):
        to_P = destination_RLE[:, layer].ravel()
        by_rank_P = np.argsort(to_P, kind="stable")
        first_D = np.flatnonzero(np.diff(to_P[by_rank_P], prepend=-1))
        sent_TP = source_TRLE[:, :, layer].reshape(steps, -1)[:, by_rank_P]
        reached_D = to_P[by_rank_P][first_D]
        loads_TLR[:, layer, reached_D] = np.add.reduceat(sent_TP, first_D, axis=1, dtype=np.float64)
    return loads_TLR
