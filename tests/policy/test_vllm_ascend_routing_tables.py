"""Tests of the routing tables that policy mode writes in vLLM-Ascend's second runner."""

import types

import numpy as np
import pytest
import torch

from worker_agent.policy.vllm_ascend.dealing import rows_of_slots
from worker_agent.policy.vllm_ascend.routing_table import ROWS, routing_table
from worker_agent.policy.vllm_ascend.second_runner import write_table

RANKS = 4
EXPERTS = 8


def skewed(seed=0, layers=3):
    """Return heat ``[N, L, E]`` and a placement ``[L, P]`` with four extra replicas per layer."""
    draw = np.random.default_rng(seed)
    heat_NLE = draw.poisson(4000 * draw.dirichlet(np.full(EXPERTS, 0.6), layers), (16, layers, EXPERTS))
    placement_LP = np.stack(
        [
            np.concatenate(
                [draw.permutation(EXPERTS).reshape(RANKS, 2), draw.permutation(EXPERTS)[:RANKS, None]], 1
            )
            for _ in range(layers)
        ]
    ).reshape(layers, -1)
    return heat_NLE, placement_LP


def loads(heat_NE, rows_P, slots_P):
    """Return the load of each rank in each part of the window, ``[N, R]``."""
    return (heat_NE[:, slots_P] * rows_P / ROWS).reshape(len(heat_NE), RANKS, -1).sum(axis=2)


@pytest.mark.parametrize("seed", range(6))
def test_table_rows_lower_the_peak_load_and_cover_every_expert(seed):
    heat_NLE, placement_LP = skewed(seed)
    rows_LP = rows_of_slots(heat_NLE, placement_LP, RANKS)
    for layer, (rows_P, slots_P) in enumerate(zip(rows_LP, placement_LP, strict=True)):
        assert np.bincount(slots_P, rows_P, minlength=EXPERTS).tolist() == [ROWS] * EXPERTS
        equal_P = ROWS / np.bincount(slots_P, minlength=EXPERTS)[slots_P]
        heat_NE = heat_NLE[:, layer]
        assert (
            loads(heat_NE, rows_P, slots_P).max(1).mean()
            <= loads(heat_NE, equal_P, slots_P).max(1).mean() + 8
        )
    equal_LP = np.stack([ROWS / np.bincount(slots_P, minlength=EXPERTS)[slots_P] for slots_P in placement_LP])
    assert (rows_LP != equal_LP.round()).any()


def test_replicas_of_experts_without_tokens_get_equal_numbers_of_rows():
    rows_LP = rows_of_slots(np.zeros((2, 1, 2), dtype=np.int64), np.array([[0, 1, 0, 1, 0, 1]]), ranks=3)
    assert rows_LP.tolist() == [[342, 342, 341, 341, 341, 341]]


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_table_entry_points_to_a_slot_of_its_expert(rank):
    heat_NLE, placement_LP = skewed()
    for rows_P, slots_P in zip(rows_of_slots(heat_NLE, placement_LP, RANKS), placement_LP, strict=True):
        table_DE = routing_table(rows_P, slots_P, rank, RANKS)
        assert table_DE.shape == (ROWS, EXPERTS)
        assert table_DE.dtype == np.int32
        assert (slots_P[table_DE] == np.arange(EXPERTS)).all()
        assert np.bincount(table_DE.ravel(), minlength=slots_P.size).tolist() == rows_P.tolist()


def test_small_batches_are_split_in_the_same_proportions():
    table_DE = routing_table(np.array([768, 1024, 256]), np.array([0, 1, 0]), rank=0, ranks=2)
    for rows in (8, 16, 64):
        assert (table_DE[:rows, 0] == 0).sum() == rows * 3 // 4


def test_ranks_start_at_different_replicas():
    rows_P = np.array([512, 512])
    slots_P = np.array([0, 0])
    first = [int(routing_table(rows_P, slots_P, rank, 64)[0, 0]) for rank in range(64)]
    assert first.count(0) == first.count(1) == 32


def layer_state(routing_DE, slots_P):
    eplb_state = types.SimpleNamespace(expert_replica_routing_table=routing_DE)
    model = types.SimpleNamespace(moe_layers=[types.SimpleNamespace(eplb_state=eplb_state)])
    return types.SimpleNamespace(model=model, physical_to_logical_map=torch.tensor([slots_P]))


def test_a_table_is_written_in_place():
    routing_DE = torch.tensor([[0, 1]] * ROWS, dtype=torch.int32)
    address = routing_DE.data_ptr()
    table_DE = torch.tensor([[2, 1]] * ROWS, dtype=torch.int32)
    write_table(layer_state(routing_DE, [0, 1, 0]), 0, table_DE)
    assert routing_DE.data_ptr() == address
    assert routing_DE.equal(table_DE)


def test_entries_for_a_different_placement_are_not_written():
    routing_DE = torch.tensor([[0, 1]] * ROWS, dtype=torch.int32)
    table_DE = torch.tensor([[2, 1], [0, 2]] * (ROWS // 2), dtype=torch.int32)
    write_table(layer_state(routing_DE, [0, 1, 1]), 0, table_DE)
    assert routing_DE[:2].tolist() == [[0, 1], [0, 2]]
