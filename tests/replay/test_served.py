"""A replay of heat that was recorded by source scores each rank's actual tokens, step by step."""

import numpy as np
import pytest

from eplb_core.placement import Placement, par
from eplb_core.planner.plan import Layout
from eplb_core.planner.price import SplitCost
from eplb_core.planner.score import slowest_rank_us, split_loads
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

STEPS = 60
LAYERS = 2
RANKS = 4
EXPERTS = 8
SLOTS = 3
PLACEMENT = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
RNG = np.random.default_rng(3)
# The source ranks of each expert's tokens change at every step, which a mean over steps would hide.
SOURCE_TRLE = RNG.poisson(20 * RNG.dirichlet(np.ones(RANKS), (STEPS, LAYERS, EXPERTS)).transpose(0, 3, 1, 2))


@pytest.fixture
def recorded(tmp_path):
    """Return a trace as recorded by the service, with tokens by slot and by source under the engines' tables."""
    slots_TLP = dealt_one_by_one(SOURCE_TRLE, PLACEMENT.default_log2phy(), RANKS * SLOTS)
    facts = TraceFacts(ranks=RANKS, slots=SLOTS)
    with TraceWriter(tmp_path / "a.zarr", facts, LAYERS, EXPERTS) as writer:
        for layer in range(LAYERS):
            writer.place(layer, 0, PLACEMENT.phy2log_LRS[layer])
        writer.append(slots_TLP, np.zeros((STEPS, LAYERS)), source_TRLE=SOURCE_TRLE)
    return open_trace(tmp_path / "a.zarr"), slots_TLP.reshape(STEPS, LAYERS, RANKS, SLOTS).sum(axis=3)


def test_tokens_follow_the_tables_of_their_source():
    destination_RLE = RNG.integers(0, RANKS, (RANKS, LAYERS, EXPERTS))
    destination_RLE[destination_RLE == 2] = 0
    loads_TLR = _loads_from_sources(SOURCE_TRLE, destination_RLE, RANKS)
    assert np.array_equal(loads_TLR, dealt_one_by_one(SOURCE_TRLE, destination_RLE, RANKS))
    assert not loads_TLR[:, :, 2].any()


def test_a_replay_without_changes_reproduces_the_measured_par(recorded):
    trace, loads_TLR = recorded
    jobs = jobs_for(["none", "flashlb"], [Setup(SLOTS, 20, 20)], PlannerSettings())
    result = replay(trace, jobs, scene_for(RANKS))
    measured_L = par(loads_TLR[20:].astype(float))
    assert result.policies[0].par_realised_L == pytest.approx(measured_L)
    assert result.baselines[0].par_DL.mean(axis=0) == pytest.approx(measured_L)
    assert result.policies[1].par_realised < measured_L.mean()


def test_trace_statistics_report_the_recorded_balance(recorded):
    trace, loads_TLR = recorded
    assert statistics(trace, window=16).par_served_L == pytest.approx(par(loads_TLR.astype(float)))


def test_a_host_with_a_stepwise_split_is_scored_without_tables(recorded):
    trace, _ = recorded
    settings = PlannerSettings(split="even")
    result = replay(trace, jobs_for(["none"], [Setup(SLOTS, 20, 20)], settings), scene_for(RANKS))
    heat_TLE = SOURCE_TRLE.sum(axis=1)[20:]
    loads_TLR = split_loads(heat_TLE, PLACEMENT, PLACEMENT.default_log2phy(), None, "even", 20)
    assert result.policies[0].par_realised_L == pytest.approx(par(loads_TLR))
    assert result.baselines[0].par_DL.mean(axis=0) == pytest.approx(par(loads_TLR))


def test_the_slowest_ranks_time_is_computed_from_its_slots_actual_tokens(recorded):
    trace, _ = recorded
    tables_RLE = PLACEMENT.default_log2phy()
    slots_TLP = dealt_one_by_one(SOURCE_TRLE, tables_RLE, RANKS * SLOTS)
    actual_TL = served_us(trace, trace.heat(0, STEPS), 0, Layout(PLACEMENT, tables_RLE), "tables", FUSED)
    for step, layer in ((0, 0), (17, 1), (59, 0)):
        of_ranks = slots_TLP[step, layer].reshape(RANKS, SLOTS).tolist()
        batch = slots_TLP[step, layer].sum()
        slowest = max(plain_rank_us(FUSED, tokens, batch) for tokens in of_ranks)
        assert actual_TL[step, layer] == pytest.approx(slowest)


def test_a_replay_with_a_curve_reports_milliseconds(recorded):
    trace, _ = recorded
    settings = PlannerSettings(cost_curve=H200)
    jobs = jobs_for(["none", "flashlb"], [Setup(SLOTS, 20, 20)], settings, hindsight=False)
    result = replay(trace, jobs, scene_for(RANKS, Costs(curve=H200)))
    left_alone = served_us(
        trace, trace.heat(20, STEPS), 20, Layout(PLACEMENT, PLACEMENT.default_log2phy()), "tables", H200
    )
    none, flashlb = (result.score(policy) for policy in result.policies)
    assert none.moe_ms == pytest.approx(left_alone.mean(axis=0).sum() / 1e3)
    assert none.moe_ms_left_alone == pytest.approx(none.moe_ms)
    assert none.saved_ms == pytest.approx(0, abs=1e-9)
    assert flashlb.saved_ms == pytest.approx(flashlb.moe_ms_left_alone - flashlb.moe_ms)


def test_a_replay_deals_each_steps_tokens_one_by_one(recorded):
    trace, _ = recorded
    settings = PlannerSettings(split="deal", deal_width=4)
    result = replay(trace, jobs_for(["none"], [Setup(SLOTS, 20, 20)], settings), scene_for(RANKS))
    tables_RLED = PLACEMENT.default_log2phy(4)
    loads_TLR = dealt_one_by_one(SOURCE_TRLE, tables_RLED // SLOTS, RANKS)
    assert result.policies[0].par_realised_L == pytest.approx(par(loads_TLR[20:]))
    assert result.baselines[0].par_DL.mean(axis=0) == pytest.approx(par(loads_TLR[20:]))
    both = replay(trace, jobs_for(["flashlb"], [Setup(SLOTS, 20, 20)], settings), scene_for(RANKS))
    assert both.policies[0].par_realised < par(loads_TLR[20:]).mean()


def test_the_time_of_a_stepwise_split_includes_its_own_cost(recorded):
    trace, _ = recorded
    settings = PlannerSettings(cost_curve=H200, split="step")
    costs = Costs(curve=H200, split=SplitCost.of(settings, RANKS, EXPERTS))
    jobs = jobs_for(["none"], [Setup(SLOTS, 20, 20)], settings, hindsight=False)
    result = replay(trace, jobs, scene_for(RANKS, costs))
    heat_TLE = SOURCE_TRLE.sum(axis=1)[20:]
    us_TL = slowest_rank_us(heat_TLE, PLACEMENT, PLACEMENT.default_log2phy(), None, "step", H200)
    [by_step] = result.policies
    assert by_step.moe_ms == pytest.approx((us_TL + costs.split.us).mean(axis=0).sum() / 1e3)
    assert result.score(by_step).moe_ms_left_alone == pytest.approx(by_step.moe_ms)
