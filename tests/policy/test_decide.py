"""Tests of policy mode's decisions, from any placement that an engine may have."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.policy import decide as module
from worker_agent.policy.decide import decide
from worker_agent.policy.figures import fetched_experts, par_of_even_split

TWICE_ON_A_RANK = np.array([[0, 0, 1, 2, 3, 1]])
"""A placement that DeepSeek's packing may produce: the first of two ranks has two replicas of expert 0."""


def skewed_heat(parts=32, layers=2, experts=8, seed=0):
    """Return heat with a constant, skewed popularity of experts, int64 ``[N, L, E]``."""
    draw = np.random.default_rng(seed)
    popularity_LE = draw.permuted(np.tile(1.0 / np.arange(1, experts + 1), (layers, 1)), axis=1)
    return draw.poisson(4000 * popularity_LE, size=(parts, layers, experts))


def linear(layers, experts, physical):
    """Return vLLM's initial placement, int64 ``[L, P]``."""
    return np.tile(np.arange(physical) % experts, (layers, 1))


def check_placement(old_LP, new_LP, ranks, experts):
    """Check that the new placement can be served and that experts that stay on their rank keep their slots."""
    assert new_LP.shape == old_LP.shape
    assert new_LP.dtype == np.int64
    for old_RS, new_RS in zip(
        old_LP.reshape(len(old_LP), ranks, -1), new_LP.reshape(len(new_LP), ranks, -1), strict=True
    ):
        assert set(new_RS.ravel()) == set(range(experts))
        for old_S, new_S in zip(old_RS.tolist(), new_RS.tolist(), strict=True):
            assert len(set(new_S)) == len(new_S)
            for slot, expert in enumerate(new_S):
                assert expert not in old_S or old_S[slot] == expert or old_S.count(expert) > 1


def test_a_decision_balances_skewed_heat():
    heat_NLE = skewed_heat()
    old_LP = linear(2, 8, 12)
    new_LP = decide(heat_NLE, old_LP, ranks=4)
    check_placement(old_LP, new_LP, 4, 8)
    assert par_of_even_split(heat_NLE, old_LP, 4) > 1.5
    assert par_of_even_split(heat_NLE, new_LP, 4) < 1.15


def test_a_second_decision_on_the_same_heat_moves_nothing():
    heat_NLE = skewed_heat()
    first_LP = decide(heat_NLE, linear(2, 8, 12), ranks=4)
    assert decide(skewed_heat(seed=0), first_LP, ranks=4).tolist() == first_LP.tolist()


def test_the_old_placement_may_have_an_expert_twice_on_a_rank():
    heat_NLE = np.tile([4000, 1000, 1000, 2000], (8, 1, 1))
    new_LP = decide(heat_NLE, TWICE_ON_A_RANK, ranks=2)
    check_placement(TWICE_ON_A_RANK, new_LP, 2, 4)
    assert par_of_even_split(heat_NLE, new_LP, 2) < par_of_even_split(heat_NLE, TWICE_ON_A_RANK, 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_decision_can_start_from_any_placement_that_serves_all_experts(data):
    ranks = data.draw(st.integers(1, 4), label="ranks")
    slots = data.draw(st.integers(1, 4), label="slots")
    experts = data.draw(st.integers(slots, ranks * slots), label="experts")
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    spare = draw.integers(0, experts, ranks * slots - experts)
    old_LP = draw.permutation(np.concatenate([np.arange(experts), spare]))[None]
    heat_NLE = draw.poisson(draw.pareto(1.0, experts) * 100, size=(8, 1, experts))
    split = data.draw(st.sampled_from(["even", "tables", "step"]), label="split")
    new_LP = decide(heat_NLE, old_LP, ranks, split=split)
    if not heat_NLE.any():
        assert new_LP.tolist() == old_LP.tolist()
        return
    check_placement(old_LP, new_LP, ranks, experts)
    assert decide(heat_NLE, old_LP, ranks, split=split).tolist() == new_LP.tolist()


def test_the_engine_decides_if_a_slot_is_empty():
    assert decide(skewed_heat(layers=1, experts=4), [[0, 1, 2, 3, -1, 0]], ranks=2) is None


def test_parts_without_tokens_do_not_change_a_decision():
    heat_NLE = skewed_heat()
    padded_NLE = np.concatenate([np.zeros_like(heat_NLE), heat_NLE])
    old_LP = linear(2, 8, 12)
    assert decide(padded_NLE, old_LP, ranks=4).tolist() == decide(heat_NLE, old_LP, ranks=4).tolist()


def test_the_sum_of_a_window_alone_is_enough_to_balance_the_ranks():
    heat_NLE = skewed_heat().sum(axis=0, keepdims=True)
    old_LP = linear(2, 8, 12)
    new_LP = decide(heat_NLE, old_LP, ranks=4, timed=False)
    assert fetched_experts(old_LP, new_LP, 4).all()
    assert par_of_even_split(heat_NLE, new_LP, 4) < 1.1


def test_a_node_count_that_does_not_divide_the_ranks_is_ignored():
    heat_NLE = skewed_heat()
    old_LP = linear(2, 8, 12)
    alone_LP = decide(heat_NLE, old_LP, ranks=4)
    assert decide(heat_NLE, old_LP, ranks=4, nodes=3).tolist() == alone_LP.tolist()


@pytest.mark.parametrize(
    ("heat", "old"),
    [
        (-skewed_heat(), linear(2, 8, 12)),
        (skewed_heat(layers=3), linear(2, 8, 12)),
        (skewed_heat(), linear(2, 8, 13)),
        (skewed_heat(), linear(2, 7, 12)),
        (skewed_heat()[0], linear(2, 8, 12)),
    ],
    ids=["negative", "layers", "slots", "expert-without-slot", "no-parts"],
)
def test_an_error_is_counted_and_logged_once_and_never_raised(heat, old, monkeypatch, caplog):
    monkeypatch.setattr(module, "FAILURES", type(module.FAILURES)())
    with caplog.at_level(logging.ERROR):
        assert decide(heat, old, ranks=4) is None
        assert decide(heat, old, ranks=4) is None
    assert list(module.FAILURES.values()) == [2]
    assert [record.message for record in caplog.records] == [
        "the planner failed; the engine's own policy decides instead"
    ]
