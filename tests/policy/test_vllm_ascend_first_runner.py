"""Tests of policy mode in vLLM-Ascend's first runner: the cycle, the parts of the interval, and the agreement."""

import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist

from tests.policy import ascend_fakes
from tests.policy.ascend_fakes import LAYERS, RANKS, SLOTS, TABLE, maps_of
from tests.ranks import run_ranks
from worker_agent.policy import decide as decisions
from worker_agent.policy.vllm_ascend import first_runner
from worker_agent.policy.vllm_ascend.first_runner import AgreedTable, table_of_maps

COUNTS = torch.tensor([[100, 100, 6000], [100, 100, 100]])
"""Tokens of each rank's slots in one step. Expert 2 is by far the hottest, but has one replica."""


def installed(policy, interval, execution, mix_placement=False):
    """Return the updater of this rank, with policy mode installed into the fakes."""
    put = sys.modules.__setitem__
    config = types.SimpleNamespace(mix_placement=mix_placement)
    for name, contents in {
        "vllm_ascend": {},
        "vllm_ascend.ascend_config": {"get_ascend_config": lambda: config},
        "vllm_ascend.eplb": {},
        "vllm_ascend.eplb.core": {},
        "vllm_ascend.eplb.core.eplb_worker": {"EplbWorker": ascend_fakes.EplbWorker},
        "vllm_ascend.eplb.eplb_updator": {"EplbUpdator": ascend_fakes.EplbUpdator},
        "vllm_ascend.worker": {},
        "vllm_ascend.worker.model_runner_v1": {"NPUModelRunner": ascend_fakes.Runner},
        "vllm_ascend.worker.worker": {"NPUWorker": ascend_fakes.Worker},
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: ascend_fakes.CONFIG},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"_node_count": lambda _group: 1},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        put(name, module)
    first_runner.check_functions = lambda _allow: None
    first_runner.install()
    facts = types.SimpleNamespace(
        eplb_policy_type=policy,
        expert_heat_collection_interval=interval,
        algorithm_execution_interval=execution,
    )
    return ascend_fakes.EplbUpdator(facts, None, None, None)


def served(updator, cycles):
    """Serve complete cycles, and return this rank's table and events."""
    rank = dist.get_rank()
    steps = updator.expert_heat_collection_interval + updator.algorithm_execution_interval + LAYERS
    for step in range(cycles * steps):
        updator.forward_before()
        updator.adaptor.receive(COUNTS[rank].expand(LAYERS, SLOTS), step % steps)
        updator.forward_end()
    return updator.eplb_process.worker.table.tolist(), updator.events


def a_cycle(policy=1, interval=16, execution=8):
    return served(installed(policy, interval, execution), 1)


@pytest.mark.parametrize("policy", [1, 3])
def test_all_ranks_get_the_planners_table(policy):
    (first, events), (second, _) = run_ranks(RANKS, a_cycle, policy)
    assert first == second
    for table_RS in first:
        assert sum(row.count(2) for row in table_RS) == 2
        assert table_RS[0] == [0, 1, 2]
    assert events == [("woken", 19), ("read", 23)]


@pytest.mark.parametrize("execution", [1, 2, 3])
def test_the_table_arrives_before_the_engine_waits_for_it(execution):
    for _, events in run_ranks(RANKS, a_cycle, 1, 16, execution):
        (_, woken), (_, read) = events
        assert 16 <= woken <= read == 16 + execution - 1


def heat_of_a_cycle(policy, parts):
    """Return the heat that the first rank's planner receives, per part, and whether it is timed."""
    received = []

    def keep(heat_NLE, old_LP, _ranks, *, timed, **_):
        received.append((heat_NLE[:, 0].tolist(), old_LP.tolist(), timed))

    decisions.decide = keep
    updator = installed(policy, 8, 4)
    updator.eplb_agent_planner._parts = parts
    served(updator, 2)
    return received


@pytest.mark.parametrize("policy", [0, 3])
@pytest.mark.parametrize("parts", [1, 3, 8, 64])
def test_the_planner_gets_the_heat_of_an_interval_in_parts(policy, parts):
    received, nothing = run_ranks(RANKS, heat_of_a_cycle, policy, parts)
    assert nothing == []
    # Neither decision is used, so the engine's own policy swaps the ranks' slots after the first one.
    assert [old_LP[0] for _, old_LP, _ in received] == [[0, 1, 2, 3, 0, 1], [3, 0, 1, 0, 1, 2]]
    of_a_step = ([200, 200, 6000, 100], [200, 6100, 100, 100])
    for (heat_NE, _, timed), counts_E in zip(received, of_a_step, strict=True):
        steps_N = [heat_E[3] // 100 for heat_E in heat_NE]
        assert len(steps_N) == min(parts, 8)
        assert sum(steps_N) == 8
        assert max(steps_N) - min(steps_N) <= 1
        assert heat_NE == [[steps * count for count in counts_E] for steps in steps_N]
        assert timed == (parts > 1)


def only_the_first_rank_fails():
    if dist.get_rank() == 0:
        decisions.decide = None
    return served(installed(1, 8, 4), 1)


def test_the_engines_policy_decides_on_all_ranks_if_the_first_rank_fails():
    for table, events in run_ranks(RANKS, only_the_first_rank_fails):
        assert table == TABLE.flip(1).tolist()
        assert [name for name, _ in events] == ["woken", "read"]


def with_mixed_placement():
    return served(installed(1, 8, 4, mix_placement=True), 1)


def test_the_engine_decides_as_before_if_shared_experts_are_placed_like_routed_ones():
    for table, events in run_ranks(RANKS, with_mixed_placement):
        assert table == TABLE.flip(1).tolist()
        assert events == [("woken", 7), ("read", 11)]


def loaded_while_serving():
    runner = ascend_fakes.Runner()
    before = runner.reload_weights()
    installed(1, 8, 4)
    with pytest.raises(RuntimeError, match="reload_weights: vLLM-Ascend would load the weights into"):
        runner.reload_weights()
    return before


def test_weights_cannot_be_loaded_as_soon_as_the_engine_has_an_updater():
    assert run_ranks(RANKS, loaded_while_serving) == ["loaded"] * RANKS


def test_the_policy_can_be_sent_to_the_eplb_process():
    shared = {"eplb_agent_table": TABLE}
    policy = pickle.loads(pickle.dumps(AgreedTable(ascend_fakes.EnginePolicy(), shared)))
    changed, layers, table = policy.rebalance_experts(TABLE.flip(1), None)
    assert (changed, layers, table.tolist()) == (1, [0, 1], TABLE.tolist())
    assert policy.rebalance_experts(TABLE, None)[0] == 0


def test_a_slot_without_an_expert_is_empty():
    maps_LRE = maps_of(TABLE)
    assert table_of_maps(maps_LRE, SLOTS).tolist() == TABLE.tolist()
    maps_LRE[0, 1, 3] = -1
    assert table_of_maps(maps_LRE, SLOTS)[0, 1].tolist() == [-1, 0, 1]
