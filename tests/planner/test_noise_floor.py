"""The planner does not change a layer if random jumps in its experts' heat explain all differences between ranks."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, par
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.plan import Plan
from eplb_core.planner.score import split_steps, volatility_bound
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from tests.planner.drawn import rank_loads
from tests.solver.layers_of import heat_of_kind
from tests.solver.placed_layer import random_placement

EXPERTS = 32
RANKS = 8
SLOTS = 5
STEPS = 64


def slow_volatility_bound(
    heat_NLE: np.ndarray, loads_NLR: np.ndarray, replicas_LE: np.ndarray, ranks: int
) -> list[float]:
    """Slow twin: return the bound on the PAR that jumps in the experts' heat can explain."""
    bounds = []
    score = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    for layer in range(heat_NLE.shape[1]):
        shares = [heat_E / heat_E.sum() for heat_E in heat_NLE[:, layer] if heat_E.sum() > 0]
        jumps = [now_E - before_E for before_E, now_E in itertools.pairwise(shares)]
        if not jumps:
            bounds.append(1.0)
            continue
        variance_E = np.mean([jump_E**2 for jump_E in jumps], axis=0) / 2
        # Each of k replicas with share 1/k adds variance/k**2 to its rank. The sum is averaged over the ranks.
        variance_of_rank = sum(variance_E / replicas_LE[layer]) / ranks
        shares = [load_R / load_R.sum() for load_R in loads_NLR[:, layer] if load_R.sum() > 0]
        measured = [(now_R - before_R) ** 2 / 2 for before_R, now_R in itertools.pairwise(shares)]
        variance_of_rank = min(variance_of_rank, np.mean(measured))
        bounds.append(1.0 + score * np.sqrt(variance_of_rank) * ranks)
    return bounds


def bound_of(heat_NLE: np.ndarray, placement: Placement) -> np.ndarray:
    """Return the bound with one step per episode, float64 ``[L]``."""
    table_RLE = placement.default_log2phy()
    return volatility_bound(
        split_steps(heat_NLE, placement, table_RLE, None, "tables", episodes=len(heat_NLE))
    )


def steady(seed: int, steps: int = STEPS) -> np.ndarray:
    """Draw all steps from the same popularity, ``[T, 1, E]``."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(8000, generator.dirichlet(np.ones(EXPERTS)), (steps, 1))


def placed_on(heat_TLE: np.ndarray) -> tuple[Placement, np.ndarray]:
    """Return the layout obtained by placing experts for this heat from scratch."""
    first = Placement.linear(1, EXPERTS, RANKS, SLOTS)
    result = plan_from_scratch(Window(heat_TLE), first, Topology.flat(RANKS), PlannerSettings())
    (changed,) = result.layers
    return first.with_layers([(0, changed.phy2log_RS)]), changed.log2phy_RE[:, None, :]


def decided(heat_TLE: np.ndarray, placement: Placement, table_RLE: np.ndarray, ranks: int = RANKS) -> Plan:
    return plan(Window(heat_TLE), placement, table_RLE, Topology.flat(ranks), PlannerSettings())


@settings(max_examples=60)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from(("even", "skewed", "sparse", "zero")),
    st.integers(0, 10**6),
)
def test_the_volatility_bound_matches_the_slow_twin(ranks: int, slots: int, kind: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    experts = int(generator.integers(slots, ranks * slots + 1))
    placement = Placement(random_placement(ranks, slots, experts, generator)[None], experts)
    heat_NLE = heat_of_kind(kind, int(generator.integers(1, 7)), experts, generator)[:, None, :]
    loads_NLR = rank_loads(heat_NLE, placement, placement.default_log2phy())
    np.testing.assert_allclose(
        bound_of(heat_NLE, placement),
        slow_volatility_bound(heat_NLE, loads_NLR, placement.replicas(), ranks),
        rtol=1e-9,
    )


@pytest.mark.parametrize("seed", range(4))
def test_balanced_layers_with_steady_heat_do_not_change(seed: int) -> None:
    heat_TLE = steady(seed, 2 * STEPS)
    placement, table_RLE = placed_on(heat_TLE[:STEPS])
    decision = decided(heat_TLE[STEPS:], placement, table_RLE)
    assert decision.layers == ()
    assert decision.verdicts[0].reason.startswith("left alone")


@pytest.mark.parametrize("period", [8, 16, 32])
def test_a_badly_placed_alternating_workload_is_not_mistaken_for_jumps(period: int) -> None:
    # Two domains alternate. Ranks 0 to 3 hold the first domain's experts, and ranks 4 to 7 the second domain's.
    generator = np.random.default_rng(period)
    first = np.repeat(np.arange(2), EXPERTS // 2)
    popularity_2E = np.where(first == np.arange(2)[:, None], 9.0, 1.0) * generator.uniform(0.9, 1.1, EXPERTS)
    popularity_2E /= popularity_2E.sum(axis=1, keepdims=True)
    heat_TLE = np.stack(
        [generator.multinomial(8000, popularity_2E[step // period % 2], 1) for step in range(STEPS)]
    )
    row_RS = np.arange(EXPERTS).reshape(RANKS, 4)[:, ::-1]
    placement = Placement(row_RS[None], EXPERTS)
    table_RLE = placement.default_log2phy()
    seen = par(rank_loads(heat_TLE, placement, table_RLE))[0]
    # The mean loads are balanced, but half of the ranks are idle in every step.
    assert par(rank_loads(heat_TLE.sum(axis=0, keepdims=True), placement, table_RLE))[0] < 1.2
    bound = bound_of(heat_TLE, placement)
    assert seen - bound[0] > 0.3
    turned = decided(heat_TLE, placement, table_RLE)
    assert turned.layers
    assert turned.par_planned < 0.75 * seen
