"""Tests of policy mode in vLLM-Ascend's second runner: the policy object and the routing tables after a decision."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.adapters.sglang_fakes import put_modules
from tests.ranks import run_ranks
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.vllm_ascend import second_runner
from worker_agent.policy.vllm_ascend.second_runner import PlannerPolicy

RANKS = 2
OLD = torch.tensor([[0, 1, 2, 3, 0, 1]] * 2, dtype=torch.int32)
HEAT = torch.tensor([[2000, 1000, 6000, 1000], [1000, 1000, 1000, 1000]])
"""Expert 2 of the first layer is the hottest; the second layer is balanced."""


@dataclass
class PreparedLoadStats:
    values: torch.Tensor
    sample_counts: object = None


class Default:
    """vLLM's default policy, with a recognisable result."""

    def rebalance_experts(self, weight, replicas, groups, nodes, ranks, old):
        assert weight.shape == (2, 4)
        return old.flip(1)


class Stair(Default):
    """vLLM-Ascend's policy, which takes prepared statistics and further arguments."""

    def prepare_local_load_stats(self, samples):
        raise AssertionError("the planner prepares the statistics")

    def rebalance_experts(self, weight, *arguments, last_committed_mean_ratios, rank_node_ids):
        assert last_committed_mean_ratios == "ratios"
        assert rank_node_ids.tolist() == [0, 0]
        assert weight.sample_counts.tolist() == [1] * 8
        return arguments[-1].flip(1)


def prepared():
    """Return the statistics of eight steps with equal heat."""
    return PreparedLoadStats(HEAT.repeat(8, 1, 1), np.ones(8, dtype=np.int64))


def decided(fallback, warm):
    policy = PlannerPolicy(fallback, Agreement(dist.group.WORLD, "even"), parts=64)
    if warm:
        policy._agreement.wait_until_warm()
    else:
        policy._agreement.decided_here = lambda *_, **__: None
    dist.barrier()
    new = policy.rebalance_experts(
        prepared(),
        6,
        1,
        1,
        RANKS,
        OLD,
        last_committed_mean_ratios="ratios",
        rank_node_ids=np.zeros(2, dtype=int),
    )
    rows_LP = policy.take_rows()
    assert policy.take_rows() is None
    assert new.dtype == OLD.dtype
    return new.tolist(), None if rows_LP is None else rows_LP.tolist()


def test_all_ranks_get_the_planners_placement_and_rows():
    first, second = run_ranks(RANKS, decided, Default(), True)
    assert first == second
    new_LP, rows_LP = first
    assert new_LP == [[0, 1, 2, 3, 0, 2], [0, 1, 2, 3, 0, 1]]
    assert [rows_P[1] for rows_P in rows_LP] == [1024, 512]


@pytest.mark.parametrize("fallback", [Default(), Stair()])
def test_the_engines_policy_gets_its_own_arguments_if_the_planner_cannot_decide(fallback):
    for new_LP, rows_LP in run_ranks(RANKS, decided, fallback, False):
        assert new_LP == OLD.flip(1).tolist()
        assert rows_LP is None


class Alone:
    """An agreement of one rank that records its arguments."""

    is_first = False

    def placement(self, heat_NLE, old_LP, ranks, **options):
        self.arguments = (heat_NLE, old_LP, ranks, options)


@pytest.mark.parametrize(("parts", "steps"), [(4, 10), (64, 10), (1, 3)])
def test_samples_are_divided_into_parts_with_known_step_counts(parts, steps, monkeypatch):
    packages = {
        name: {} for name in ("vllm_ascend", "vllm_ascend.distributed", "vllm_ascend.distributed.eplb")
    }
    policy = {"vllm_ascend.distributed.eplb.policy": {"PreparedLoadStats": PreparedLoadStats}}
    put_modules(monkeypatch, {**packages, **policy})
    samples_TLP = torch.ones(steps, 2, 6, dtype=torch.int32)
    stats = PlannerPolicy(Default(), Alone(), parts).prepare_local_load_stats(samples_TLP)
    assert stats.sample_counts.sum() == steps
    assert len(stats.sample_counts) == min(parts, steps)
    assert stats.values[:, 0, 0].tolist() == stats.sample_counts.tolist()


@pytest.mark.parametrize("weight", [HEAT, HEAT[None], prepared()], ids=["sum", "one-part", "prepared"])
def test_a_decision_is_timed_only_if_the_window_is_in_parts(weight):
    agreement = Alone()
    policy = PlannerPolicy(Default(), agreement, 64)
    policy.rebalance_experts(weight, 6, 1, 2, RANKS, OLD)
    heat_NLE, old_LP, ranks, options = agreement.arguments
    assert heat_NLE.shape == ((8, 2, 4) if isinstance(weight, PreparedLoadStats) else (1, 2, 4))
    assert (old_LP.tolist(), ranks) == (OLD.tolist(), RANKS)
    assert options == {"nodes": 2, "timed": isinstance(weight, PreparedLoadStats)}


@pytest.mark.parametrize(("nodes", "expected"), [([3, 3, 5, 5], 2), ([0, 1, 0, 1], 1), ([0, 0, 0, 1], 1)])
def test_nodes_must_have_equal_numbers_of_consecutive_ranks(nodes, expected):
    agreement = Alone()
    PlannerPolicy(Default(), agreement, 64).rebalance_experts(
        prepared(), 6, 1, 2, RANKS, OLD, rank_node_ids=np.array(nodes)
    )
    assert agreement.arguments[3]["nodes"] == expected


def test_a_different_interface_is_refused(monkeypatch):
    def create_eplb_policy(name):
        return name

    put_modules(monkeypatch, {"vllm_ascend": {}, "vllm_ascend._version": {"__version__": "0.31.0"}})
    with pytest.raises(
        UnsupportedEngineError, match=r"create_eplb_policy takes \(name\) instead of \(policy, stair"
    ):
        second_runner._check_parameters(create_eplb_policy)
