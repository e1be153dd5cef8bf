"""Plans for a host with dealing tables use the host's table width, and predict the loads of token-by-token dealing."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from scipy.special import pdtrc

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, apply_layers, par
from eplb_core.planner.dealing import (
    as_host_deals,
    entry_parts,
    fitted_to_host,
    poisson_above,
    shares_of_entries,
    sources_of_tables,
    tables_of_sources,
    width_in_use,
)
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from tests.placement.drawn import dealt_one_by_one
from tests.planner.drawn import rank_loads

RANKS = 4
SLOTS = 3
EXPERTS = 8
LAYERS = 2
STEPS = 48
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
POPULARITY_E = np.array([6, 4, 2, 1, 1, 1, 0.5, 0.5]) / 16


def drawn_sources(tokens: float, seed: int) -> np.ndarray:
    """Draw token counts per step, source rank, layer and expert, int64 ``[T, R, L, E]``."""
    generator = np.random.default_rng(seed)
    return generator.poisson(tokens * POPULARITY_E, (STEPS, RANKS, LAYERS, EXPERTS))


def slow_loads(source_TRLE: np.ndarray, log2phy_RLED: np.ndarray) -> np.ndarray:
    """Deal token by token and return each rank's load, ``[T, L, R]``."""
    slots_TLP = dealt_one_by_one(source_TRLE, log2phy_RLED, RANKS * SLOTS)
    return slots_TLP.reshape(*slots_TLP.shape[:2], RANKS, SLOTS).sum(axis=3)


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("mean", [0.002, 0.3, 1.0, 7.0, 40.0])
def test_entry_shares_are_expectations_over_poisson_tokens(width: int, mean: float) -> None:
    chance_C = [exp(-mean)]
    for count in range(1, 150):
        chance_C.append(chance_C[-1] * mean / count)
    expected_D = np.zeros(width)
    for count, chance in enumerate(chance_C):
        for token in range(count):
            expected_D[token % width] += chance
    share_D = entry_parts(np.array(mean), width)
    assert share_D.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(share_D, expected_D / mean, atol=2e-3)


@pytest.mark.parametrize(
    ("stated", "width", "by_row", "by_step", "split"),
    [
        ("tables", 1, False, False, "tables"),
        ("tables", 4, False, False, "deal"),
        ("tables", 4, True, False, "even"),
        ("tables", 1, False, True, "step"),
        ("tables", 4, True, True, "step"),
        ("even", 4, True, True, "even"),
        ("step", 4, True, False, "step"),
    ],
)
def test_the_default_split_is_the_hosts_split(
    stated: str, width: int, by_row: bool, by_step: bool, split: str
) -> None:
    settings = fitted_to_host(
        PlannerSettings(split=stated), width, entry_by_row=by_row, splits_by_step=by_step
    )
    assert settings.split == split


def test_many_tokens_are_dealt_nearly_evenly_and_few_tokens_go_to_the_first_entry() -> None:
    np.testing.assert_allclose(entry_parts(np.array([1e9]), 16), np.full((1, 16), 1 / 16), rtol=1e-6)
    np.testing.assert_allclose(entry_parts(np.array([0.0]), 4)[0, 0], 1.0, atol=1e-3)
    assert entry_parts(np.array([[3.0]]), 1).tolist() == [[[1.0]]]
    # The closed form, which is used beyond the grid, continues the grid without a jump.
    np.testing.assert_allclose(
        entry_parts(np.array([255.0]), 16), entry_parts(np.array([257.0]), 16), atol=1e-3
    )


def test_dealing_tables_survive_the_round_trip_through_virtual_sources() -> None:
    tables_RLED = LINEAR.default_log2phy(4)
    sources_LVE = sources_of_tables(tables_RLED, 4)
    assert sources_LVE.shape == (LAYERS, RANKS * 4, EXPERTS)
    np.testing.assert_array_equal(sources_LVE[1, 2 * 4 + 3], tables_RLED[2, 1, :, 3])
    np.testing.assert_array_equal(tables_of_sources(sources_LVE[1], RANKS), tables_RLED[:, 1])
    narrow_RLE = LINEAR.default_log2phy()
    np.testing.assert_array_equal(
        tables_of_sources(sources_of_tables(narrow_RLE, 1)[0], RANKS), narrow_RLE[:, 0]
    )
    shares_LVE = shares_of_entries(
        np.full((RANKS, LAYERS, EXPERTS), 0.25), np.full((LAYERS, EXPERTS), 1e9), 4
    )
    np.testing.assert_allclose(shares_LVE, 1 / 16, rtol=1e-5)


@pytest.mark.parametrize(
    ("host", "limit", "width"), [(16, 16, 16), (16, 64, 16), (16, 5, 4), (6, 4, 3), (1, 16, 1), (7, 4, 1)]
)
def test_the_table_width_respects_the_host_and_the_setting(host: int, limit: int, width: int) -> None:
    tables_RLE = LINEAR.default_log2phy(host)
    assert width_in_use(PlannerSettings(split="deal", deal_width=limit), tables_RLE) == width
    assert width_in_use(PlannerSettings(split="tables", deal_width=limit), tables_RLE) == 1
    dealt = as_host_deals(LINEAR.default_log2phy(width)[:, 0], host)
    assert dealt.shape == tables_RLE[:, 0].shape


@pytest.mark.parametrize("tokens", [3.0, 60.0])
def test_expected_loads_match_dealing_token_by_token(tokens: float) -> None:
    source_TRLE = drawn_sources(tokens, seed=1)
    tables_RLED = LINEAR.default_log2phy(4)
    realised_LR = slow_loads(source_TRLE, tables_RLED).mean(axis=0)
    heat_TLE = source_TRLE.sum(axis=1)
    source_RLE = source_TRLE.sum(axis=0).astype(float)
    expected_LR = rank_loads(heat_TLE, LINEAR, tables_RLED, source_RLE).mean(axis=0)
    np.testing.assert_allclose(expected_LR.sum(axis=1), realised_LR.sum(axis=1))
    np.testing.assert_allclose(expected_LR, realised_LR, rtol=0.05)


@pytest.mark.parametrize("policy", ["flashlb", "deepseek"])
@pytest.mark.parametrize(("host", "limit"), [(8, 8), (8, 4), (4, 16)])
def test_plans_have_tables_of_the_hosts_width(policy: str, host: int, limit: int) -> None:
    source_TRLE = drawn_sources(40.0, seed=2)
    window = Window(source_TRLE.sum(axis=1), source_TRLE.sum(axis=0).astype(float))
    settings = PlannerSettings(policy=policy, split="deal", deal_width=limit, threads=1)
    deployed = LINEAR.default_log2phy(host)
    decision = plan(window, LINEAR, deployed, Topology.flat(RANKS), settings)
    after, tables_RLED = apply_layers(LINEAR, deployed, decision.changes())
    assert decision.layers
    assert tables_RLED.shape == deployed.shape
    after.check_log2phy(tables_RLED)
    realised_L = par(slow_loads(source_TRLE, tables_RLED))
    seen = decision.par_planned - np.mean([verdict.optimism or 0.0 for verdict in decision.verdicts])
    assert float(realised_L.mean()) == pytest.approx(seen, abs=0.02)
    assert realised_L.mean() < par(slow_loads(source_TRLE, deployed)).mean()


def test_ranks_that_share_tokens_get_one_dealing_table() -> None:
    window = Window(drawn_sources(40.0, seed=3).sum(axis=1))
    topology = Topology(np.zeros(RANKS, dtype=np.int32), np.array([0, 0, 2, 2], dtype=np.int32))
    decision = plan_from_scratch(
        window, LINEAR, topology, PlannerSettings(split="deal", deal_width=4, threads=1)
    )
    assert decision.layers
    for layer in decision.layers:
        np.testing.assert_array_equal(layer.log2phy_RE[0], layer.log2phy_RE[1])
        np.testing.assert_array_equal(layer.log2phy_RE[2], layer.log2phy_RE[3])


def test_tables_of_a_host_with_two_nodes_prefer_the_sources_node() -> None:
    window = Window(drawn_sources(400.0, seed=4).sum(axis=1))
    nodes_R = np.array([0, 0, 1, 1], dtype=np.int32)
    near, anywhere = (
        plan_from_scratch(window, LINEAR, topology, PlannerSettings(split="deal", deal_width=4, threads=1))
        for topology in (Topology(nodes_R, np.arange(RANKS, dtype=np.int32)), Topology.flat(RANKS))
    )

    def leaving(decision: object) -> float:
        tables = np.stack([layer.log2phy_RE for layer in decision.layers])
        return float((nodes_R[tables // SLOTS] != nodes_R[None, :, None, None]).mean())

    assert leaving(near) < leaving(anywhere)


def test_poisson_tails_match_scipy() -> None:
    mean_U = np.geomspace(4096, 1e-3, 50)
    counts = 4096 + 12 * 64 + 24
    np.testing.assert_allclose(
        poisson_above(counts, mean_U), pdtrc(np.arange(counts), mean_U[:, None]), atol=1e-10
    )
