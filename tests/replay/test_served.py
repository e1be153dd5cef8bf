"""A replay of heat that was recorded by source scores what ranks really received, step by step."""

import numpy as np
import pytest

from eplb_core.placement import Placement, par
from eplb_core.planner.plan import Layout
from eplb_core.planner.price import SplitCost
from eplb_core.planner.score import split_loads, split_us
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.native import TraceWriter
from eplb_service.io.open_trace import open_trace
from eplb_service.io.trace import TraceFacts
from eplb_service.io.trace_statistics import statistics
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import Setup
from eplb_service.replay.served import _loads_from_sources, served_us
from tests.cost.curves import FUSED, H200, plain_rank_us
from tests.placement.drawn import dealt_one_by_one

STEPS, LAYERS, RANKS, EXPERTS, SLOTS = 60, 2, 4, 8, 3
PLACEMENT = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
RNG = np.random.default_rng(3)
# Which rank an expert's tokens come from changes from step to step: no mean over steps shows it.
SOURCE_TRLE = RNG.poisson(20 * RNG.dirichlet(np.ones(RANKS), (STEPS, LAYERS, EXPERTS)).transpose(0, 3, 1, 2))


@pytest.fixture
def recorded(tmp_path):
    """A trace as the service records it: tokens by slot and by source, under the engines' tables."""
    slots_TLP = dealt_one_by_one(SOURCE_TRLE, PLACEMENT.default_log2phy(), RANKS * SLOTS)
    facts = TraceFacts(ranks=RANKS, slots=SLOTS)
    with TraceWriter(tmp_path / "a.zarr", facts, LAYERS, EXPERTS) as writer:
        for layer in range(LAYERS):
            writer.place(layer, 0, PLACEMENT.phy2log_LRS[layer])
        writer.append(slots_TLP, np.zeros((STEPS, LAYERS)), source_TRLE=SOURCE_TRLE)
    return open_trace(tmp_path / "a.zarr"), slots_TLP.reshape(STEPS, LAYERS, RANKS, SLOTS).sum(axis=3)


def test_tokens_go_where_their_own_sources_table_says():
    destination_RLE = RNG.integers(0, RANKS, (RANKS, LAYERS, EXPERTS))
    destination_RLE[destination_RLE == 2] = 0
    loads_TLR = _loads_from_sources(SOURCE_TRLE, destination_RLE, RANKS)
    assert np.array_equal(loads_TLR, dealt_one_by_one(SOURCE_TRLE, destination_RLE, RANKS))
    assert not loads_TLR[:, :, 2].any()


def test_a_replay_that_changes_nothing_realises_what_the_ranks_measured(recorded):
    trace, loads_TLR = recorded
    jobs = jobs_for(["none", "flashlb"], [Setup(SLOTS, 20, 20)], PlannerSettings())
    found = replay(trace, jobs, scene_for(RANKS))
    measured_L = par(loads_TLR[20:].astype(float))
    assert found.policies[0].par_realised_L == pytest.approx(measured_L)
    assert found.baselines[0].par_DL.mean(axis=0) == pytest.approx(measured_L)
    assert found.policies[1].par_realised < measured_L.mean()


def test_statistics_show_the_balance_that_was_served(recorded):
    trace, loads_TLR = recorded
    assert statistics(trace, window=16).par_served_L == pytest.approx(par(loads_TLR.astype(float)))


def test_a_host_that_spreads_tokens_itself_is_scored_without_tables(recorded):
    trace, _ = recorded
    settings = PlannerSettings(split="even")
    found = replay(trace, jobs_for(["none"], [Setup(SLOTS, 20, 20)], settings), scene_for(RANKS))
    heat_TLE = SOURCE_TRLE.sum(axis=1)[20:]
    loads_TLR = split_loads(heat_TLE, PLACEMENT, PLACEMENT.default_log2phy(), None, "even", 20)
    assert found.policies[0].par_realised_L == pytest.approx(par(loads_TLR))
    assert found.baselines[0].par_DL.mean(axis=0) == pytest.approx(par(loads_TLR))


def test_slowest_ranks_are_timed_by_what_their_slots_really_received(recorded):
    trace, _ = recorded
    tables_RLE = PLACEMENT.default_log2phy()
    slots_TLP = dealt_one_by_one(SOURCE_TRLE, tables_RLE, RANKS * SLOTS)
    found_TL = served_us(trace, trace.heat(0, STEPS), 0, Layout(PLACEMENT, tables_RLE), "tables", FUSED)
    for step, layer in ((0, 0), (17, 1), (59, 0)):
        of_ranks = slots_TLP[step, layer].reshape(RANKS, SLOTS).tolist()
        batch = slots_TLP[step, layer].sum()
        slowest = max(plain_rank_us(FUSED, tokens, batch) for tokens in of_ranks)
        assert found_TL[step, layer] == pytest.approx(slowest)


def test_a_replay_with_a_curve_realises_milliseconds(recorded):
    trace, _ = recorded
    settings = PlannerSettings(cost_curve=H200)
    jobs = jobs_for(["none", "flashlb"], [Setup(SLOTS, 20, 20)], settings, hindsight=False)
    found = replay(trace, jobs, scene_for(RANKS, Costs(curve=H200)))
    left_alone = served_us(
        trace, trace.heat(20, STEPS), 20, Layout(PLACEMENT, PLACEMENT.default_log2phy()), "tables", H200
    )
    none, flashlb = (found.score(policy) for policy in found.policies)
    assert none.moe_ms == pytest.approx(left_alone.mean(axis=0).sum() / 1e3)
    assert none.moe_ms_left_alone == pytest.approx(none.moe_ms)
    assert none.saved_ms == pytest.approx(0, abs=1e-9)
    assert flashlb.saved_ms == pytest.approx(flashlb.moe_ms_left_alone - flashlb.moe_ms)


def test_a_replay_deals_each_steps_tokens_one_by_one(recorded):
    trace, _ = recorded
    settings = PlannerSettings(split="deal", deal_width=4)
    found = replay(trace, jobs_for(["none"], [Setup(SLOTS, 20, 20)], settings), scene_for(RANKS))
    tables_RLED = PLACEMENT.default_log2phy(4)
    loads_TLR = dealt_one_by_one(SOURCE_TRLE, tables_RLED // SLOTS, RANKS)
    assert found.policies[0].par_realised_L == pytest.approx(par(loads_TLR[20:]))
    assert found.baselines[0].par_DL.mean(axis=0) == pytest.approx(par(loads_TLR[20:]))
    both = replay(trace, jobs_for(["flashlb"], [Setup(SLOTS, 20, 20)], settings), scene_for(RANKS))
    assert both.policies[0].par_realised < par(loads_TLR[20:]).mean()


def test_a_stepwise_split_is_timed_with_what_it_takes_itself(recorded):
    trace, _ = recorded
    settings = PlannerSettings(cost_curve=H200, split="step")
    costs = Costs(curve=H200, split=SplitCost.of(settings, RANKS, EXPERTS))
    jobs = jobs_for(["none"], [Setup(SLOTS, 20, 20)], settings, hindsight=False)
    found = replay(trace, jobs, scene_for(RANKS, costs))
    heat_TLE = SOURCE_TRLE.sum(axis=1)[20:]
    us_TL = split_us(heat_TLE, PLACEMENT, PLACEMENT.default_log2phy(), None, "step", H200)
    [by_step] = found.policies
    assert by_step.moe_ms == pytest.approx((us_TL + costs.split.us).mean(axis=0).sum() / 1e3)
    assert found.score(by_step).moe_ms_left_alone == pytest.approx(by_step.moe_ms)
