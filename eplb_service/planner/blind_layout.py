"""Which layers are in a layout that was made for no heat at all: recognised by what it realises.

An engine's first layout, replicas appended in order, a map of another model: none of them was made for the heat that it
serves, and improving it move by move stops short of what placing from scratch wins. So such layers are placed from
scratch once, whatever it moves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Window
from eplb_service.placement import Float64, Placement, mean_par
from eplb_service.planner.scoring import split_steps

_AS_BAD = 0.7
"""Part of the avoidable ratio of layouts made for no heat from which on a deployment is taken to be in one.

Of the four kinds of heat of ``make bench-solver`` (256 experts on 32 ranks x 9 and 64 x 5 slots, seeds 0 and 1), such
layouts come to 0.73 to 1.35 of their mean, and those of ``flashlb`` and ``deepseek`` one to five windows of 256 steps
after they were made to 0.01 to 0.46. With 32 experts on 8 ranks x 5 slots it is 0.56 to 1.49, and 0.05 to 0.59 but on
drift, where they come to 0.86: to place these from scratch loses nothing but moves.
"""
_LEAST_AVOIDABLE = 0.05
"""Avoidable ratio of such layouts below which they are as good as any."""
_FEWEST_STEPS = 16
"""Steps below which that is not asked: soon after a change of the workload any layout may do so badly for a while."""
_SHUFFLES = 4
"""Layouts made for no heat that a deployment is compared with."""
_STEPS_COMPARED = 32
"""Newest steps that it is compared on, at most."""


def blind_layers(
    window: Window,
    placement: Placement,
    par_L: Float64,
    floor_L: Float64,
    split: str,
    *,
    grouped: bool = False,
) -> npt.NDArray[np.bool_]:
    """Layers that do just as experts in order do, or all where the deployment does hardly better; bool ``[L]``.

    Parameters
    ----------
    window
        Steps that were served.
    placement
        What serves them; only its shape counts.
    par_L, floor_L
        float64 ``[L]``, the ratio of each layer as it is served, and what no placement can win; NaN without tokens.
    split
        One of ``settings.SPLITS``.
    grouped
        Whether groups of experts are kept on their nodes: a layout that keeps them there was made for that, at least,
        so that only experts in order are recognised.
    """
    in_order = Placement.linear(placement.layers, placement.experts, placement.ranks, placement.slots)
    same_L: npt.NDArray[np.bool_] = np.isclose(
        par_L, _par_under(window, in_order, split), rtol=1e-9, atol=0.0
    )
    if not grouped and window.steps >= _FEWEST_STEPS and not same_L.all():
        some = Window(window.heat_TLE[-_STEPS_COMPARED:], window.source_RLE)
        blind_L = np.mean([_par_under(some, shuffled, split) for shuffled in _shuffles(in_order)], axis=0)
        floor = float(mean_par(floor_L))
        avoidable = float(mean_par(blind_L)) - floor
        if avoidable > _LEAST_AVOIDABLE and float(mean_par(par_L)) - floor >= _AS_BAD * avoidable:
            same_L[:] = True
    return same_L


def _shuffles(in_order: Placement) -> list[Placement]:
    """Layouts of the same shape whose experts were named at random, the same every time."""
    found = []
    for seed in range(_SHUFFLES):
        names_E = np.random.default_rng(seed).permutation(in_order.experts).astype(np.int32)
        found.append(Placement(names_E[in_order.phy2log_LRS], in_order.experts))
    return found


def _par_under(window: Window, placement: Placement, split: str) -> Float64:
    return split_steps(
        window.heat_TLE, placement, placement.default_log2phy(), window.source_RLE, split
    ).par_K
