"""What ranks really receive along a trace: each step's tokens, through the tables of the ranks that they come from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.window import Counts
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.trace import Trace
from eplb_service.placement import Float64, Int32, Placement, dealt_to, with_entries
from eplb_service.planner.scoring import split_loads, split_us
from eplb_service.planner.settings import EVEN, STEP

_STEPS_READ = 8
"""Steps whose tokens by source rank are held at a time: a step of a large deployment has megabytes of them."""


def served_loads(
    trace: Trace, heat_TLE: Counts, first: int, placement: Placement, log2phy_RLE: Int32, split: str
) -> Float64:
    """Tokens that each rank receives in the steps from ``first`` on, whose heat is ``heat_TLE``, float64 ``[t, L, R]``.

    Where the trace has as many source ranks as the placement, each step's tokens go where the table of their own source
    rank says, entry after entry where it deals. Otherwise nobody knows where tokens come from, and each expert's are
    taken to come evenly from all. A host that splits as ``even`` or ``step`` asks no tables (see
    ``PlannerSettings.split``).

    Parameters
    ----------
    trace
        What was recorded, source ranks among it.
    heat_TLE, first
        Its heat by logical expert, ``[t, L, E]``, from step ``first`` on.
    placement, log2phy_RLE
        What serves: placement and tables, int32 ``[R, L, E]``, or ``[R, L, E, D]`` where they deal.
    split
        How the host splits tokens over replicas.
    """
    if split in (EVEN, STEP) or not knows_sources(trace, placement.ranks):
        return split_loads(heat_TLE, placement, log2phy_RLE, None, split)
    destination_RLED = with_entries(log2phy_RLE // placement.slots, 3)
    loads_TLR = np.zeros((len(heat_TLE), placement.layers, placement.ranks))
    for begin in range(0, len(heat_TLE), _STEPS_READ):
        end = min(begin + _STEPS_READ, len(heat_TLE))
        source_TRLE = trace.source_rows(first + begin, first + end)
        assert source_TRLE is not None
        loads_TLR[begin:end] = dealt_loads(source_TRLE, destination_RLED, placement.ranks)
    return loads_TLR


def served_us(
    trace: Trace,
    heat_TLE: Counts,
    first: int,
    placement: Placement,
    log2phy_RLE: Int32,
    split: str,
    curve: CostCurve,
    split_overhead_us: float = 0.0,
) -> Float64:
    """Microseconds of each layer's slowest rank in the steps from ``first`` on, float64 ``[t, L]``.

    Arguments as for ``served_loads``. NaN where a layer has no tokens. What a stepwise split itself takes is in it.
    """
    if split == STEP:
        return split_us(heat_TLE, placement, log2phy_RLE, None, split, curve) + split_overhead_us
    if split == EVEN or not knows_sources(trace, placement.ranks):
        return split_us(heat_TLE, placement, log2phy_RLE, None, split, curve)
    slot_RLED = with_entries(log2phy_RLE, 3)
    us_TL = np.full((len(heat_TLE), placement.layers), np.nan)
    for begin in range(0, len(heat_TLE), _STEPS_READ):
        end = min(begin + _STEPS_READ, len(heat_TLE))
        source_TRLE = trace.source_rows(first + begin, first + end)
        assert source_TRLE is not None
        tokens_TLP = dealt_loads(source_TRLE, slot_RLED, placement.ranks * placement.slots)
        tokens_TLRS = tokens_TLP.reshape(*tokens_TLP.shape[:2], placement.ranks, placement.slots)
        slowest_TL = curve.rank_us(tokens_TLRS).max(axis=2)
        us_TL[begin:end] = np.where(tokens_TLP.any(axis=2), slowest_TL, np.nan)
    return us_TL


def knows_sources(trace: Trace, ranks: int) -> bool:
    """Whether ``trace`` has tokens by source rank, of ``ranks`` ranks."""
    return trace.facts.ranks == ranks and trace.source_rows(0, 1) is not None


def dealt_loads(source_TRLE: Array, destination_RLED: npt.NDArray[np.integer], destinations: int) -> Float64:
    """``loads_from_sources`` where each source's tokens go to the entries of ``destination_RLED`` in turn."""
    width = destination_RLED.shape[3]
    if width == 1:
        return loads_from_sources(source_TRLE, destination_RLED[..., 0], destinations)
    steps, _, layers, _ = source_TRLE.shape
    loads_TLX = np.zeros((steps, layers, destinations))
    for entry in range(width):
        dealt_TRLE = dealt_to(source_TRLE, entry, width)
        loads_TLX += loads_from_sources(dealt_TRLE, destination_RLED[..., entry], destinations)
    return loads_TLX


def loads_from_sources(
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
