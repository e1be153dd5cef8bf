"""Random heat and small plans for planner tests."""

from __future__ import annotations

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import plan
from eplb_core.planner.plan import Plan
from eplb_core.planner.score import expected_loads, split_loads
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology


def still_heat(
    steps: int, layers: int, experts: int, tokens: int, seed: int = 0, skew: float = 1.0
) -> np.ndarray:
    """Draw all steps of a layer from the same popularity distribution, int64 ``[T, L, E]``.

    A smaller ``skew`` makes the heat less even.
    """
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.full(experts, skew), layers)
    return np.stack([generator.multinomial(tokens, row_E, size=steps) for row_E in popularity_LE], axis=1)


def decided(heat_TLE: np.ndarray, slots: int, **settings: object) -> Plan:
    """Return a plan for four ranks that still have the linear placement and the default tables."""
    placement = Placement.linear(*heat_TLE.shape[1:], 4, slots)
    layout = placement, placement.default_log2phy()
    return plan(Window(heat_TLE), *layout, Topology.flat(4), PlannerSettings(**settings))


def rank_loads(
    heat_TLE: np.ndarray, placement: Placement, log2phy_RLE: np.ndarray, source_RLE: np.ndarray | None = None
) -> np.ndarray:
    """Return the expected load of each rank under the tables, float64 ``[T, L, R]``."""
    return expected_loads(heat_TLE, placement, log2phy_RLE, source_RLE, "tables")


def whole_loads(
    heat_TLE: np.ndarray,
    placement: Placement,
    log2phy_RLE: np.ndarray,
    source_RLE: np.ndarray | None = None,
    *,
    first_step: int = 0,
) -> np.ndarray:
    """Return each rank's load in whole tokens, float64 ``[T, L, R]``."""
    return split_loads(heat_TLE, placement, log2phy_RLE, source_RLE, "tables", first_step)
