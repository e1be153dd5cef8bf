"""Tests that all ranks agree on one decision."""

import numpy as np
import torch.distributed as dist

from tests.ranks import run_ranks
from worker_agent.policy import decide as module
from worker_agent.policy.agreement import Agreement, RemoteDecisionError

HEAT = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
OLD = np.array([[0, 1, 2, 3, 0, 1]])
NEW = [[0, 1, 2, 3, 0, 2]]
REMOTE = [[3, 1, 2, 2, 0, 1]]


def decided(remote=None, seconds=60.0):
    """Return this rank's result for one decision."""
    agreement = Agreement(dist.group.WORLD, "even", remote)
    agreement.wait_until_warm(seconds)
    placement = agreement.placement(HEAT, OLD, 2)
    return None if placement is None else placement.tolist()


def only_the_first_rank_can_plan():
    if dist.get_rank():
        module.decide = None
    return decided()


def a_rank_that_is_not_warm():
    Agreement._warm_up = lambda self: None
    return decided(seconds=0.0)


def an_answer_of_the_service(*_):
    return np.array(REMOTE)


def no_answer_of_the_service(*_):
    raise RemoteDecisionError("no answer within 2 s")


def a_defect_in_the_client(*_):
    raise KeyError("placement")


def test_all_ranks_adopt_the_first_ranks_decision():
    assert run_ranks(3, only_the_first_rank_can_plan) == [NEW] * 3


def test_the_engines_policy_decides_on_all_ranks_until_the_first_rank_is_warm():
    assert run_ranks(2, a_rank_that_is_not_warm) == [None] * 2


def test_all_ranks_adopt_the_services_decision():
    assert run_ranks(2, decided, an_answer_of_the_service) == [REMOTE] * 2


def test_all_ranks_decide_locally_if_the_service_does_not_answer():
    assert run_ranks(2, decided, no_answer_of_the_service) == [NEW] * 2


def test_an_unexpected_error_in_the_client_does_not_reach_the_engine():
    assert run_ranks(2, decided, a_defect_in_the_client) == [NEW] * 2
