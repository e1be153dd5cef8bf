"""Plans for many small, awkward deployments, which are computed and checked while the kernels' indices are watched."""

from __future__ import annotations

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, check_layer, check_log2phy
from eplb_core.planner.decide import plan
from eplb_core.planner.plan import Plan
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.solver.model import SearchOptions
from tests.solver.layers_of import KINDS, heat_of_kind
from tests.solver.placed_layer import random_placement

SHAPES = (
    (1, 1, 1),
    (1, 5, 1),
    (4, 1, 4),
    (6, 6, 1),
    (5, 8, 1),
    (8, 4, 2),
    (9, 4, 3),
    (7, 3, 4),
    (3, 6, 2),
    (5, 5, 4),
)
"""Triples of experts, ranks and slots per rank."""
STEPS = (1, 2, 3, 4, 7)
SETTINGS = (
    PlannerSettings(par_threshold=1.0, min_gain=0.0),
    PlannerSettings(par_threshold=1.0, min_gain=0.0, move_price=0.0),
    PlannerSettings(par_threshold=1.0, min_gain=0.0, move_price=0.0, split="even"),
    PlannerSettings(par_threshold=1.0, min_gain=0.0, move_price=0.0, split="step"),
    PlannerSettings(par_threshold=1.0, min_gain=0.0, policy="deepseek"),
    PlannerSettings(par_threshold=1.0, min_gain=0.0),
)
SWITCHED = {1: SearchOptions(warm=False), 5: SearchOptions(solve_tables=False, tree_search=False)}
"""Search options that disable parts of the method, by index in ``SETTINGS``."""


def run(steps: tuple[int, ...] = STEPS, seed: int = 0) -> int:
    """Plan for every shape and window length, with varying settings and heat; return the number of changed layers."""
    generator = np.random.default_rng(seed)
    changed = 0
    turn = 0
    for experts, ranks, slots in SHAPES:
        for length in steps:
            kinds = [KINDS[(turn + layer) % len(KINDS)] for layer in range(3)]
            heat_TLE = np.stack([heat_of_kind(kind, length, experts, generator) for kind in kinds], axis=1)
            source_RLE = generator.integers(0, 9, (ranks, 3, experts)).astype(float) if turn % 2 else None
            rows = [random_placement(ranks, slots, experts, generator) for _ in kinds]
            if turn % 3 == 0:
                rows = list(Placement.linear(3, experts, ranks, slots).phy2log_LRS)
            placement = Placement(np.stack(rows), experts)
            topology = Topology(np.arange(ranks) // 2, np.arange(ranks) // (1 + turn % 2))
            decision = plan(
                Window(heat_TLE, source_RLE),
                placement,
                shared_tables(placement, topology),
                topology,
                SETTINGS[turn % len(SETTINGS)],
                search=SWITCHED.get(turn % len(SETTINGS)),
            )
            assert_valid(decision, experts)
            changed += len(decision.layers)
            turn += 1
    return changed


def shared_tables(placement: Placement, topology: Topology) -> np.ndarray:
    """Return the fixed rule's tables, which are equal on ranks that share tokens, int32 ``[R, L, E]``."""
    _, _, group_R = topology.token_groups()
    return placement.default_log2phy()[group_R]


def assert_valid(decision: Plan, experts: int) -> None:
    """Check that no layer failed and that every changed layout is valid."""
    assert not any("failed" in verdict.reason for verdict in decision.verdicts), decision.verdicts
    for changed in decision.layers:
        check_layer(changed.phy2log_RS, experts)
        for table_E in changed.log2phy_RE:
            check_log2phy(table_E, changed.phy2log_RS)


if __name__ == "__main__":
    from eplb_core.solver.warmup import warm_up

    warm_up(threads=1)
    print(run())
