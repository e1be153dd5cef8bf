"""The vLLM adapter on vLLM's tensors alone: its tables, maps and weights follow a switch, on two ranks, in place."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm import host as vllm_host

LAYERS, EXPERTS, SLOTS, RANKS = 2, 6, 4, 2


def model_state(rank, monolithic=False):
    """What ``EplbState.add_model`` makes of a model whose experts are filled with their number."""
    first = torch.arange(RANKS * SLOTS) % EXPERTS
    layer = SimpleNamespace(
        do_naive_dispatch_combine=False,
        is_monolithic=monolithic,
        moe_config=SimpleNamespace(is_sequence_parallel=False),
    )
    mine = first[rank * SLOTS : (rank + 1) * SLOTS].float()
    weights = [[mine[:, None].repeat(1, 8) + 100 * index] for index in range(LAYERS)]
    tables = torch.full((LAYERS, EXPERTS, 4), -1)
    return SimpleNamespace(
        model=SimpleNamespace(moe_layers=[layer] * LAYERS, expert_weights=weights),
        physical_to_logical_map=first.repeat(LAYERS, 1),
        logical_to_physical_map=tables,
        logical_replica_count=torch.full((LAYERS, EXPERTS), 2),
        expert_load_pass=torch.zeros((LAYERS, RANKS * SLOTS), dtype=torch.int32),
    )


def started():
    rank = dist.get_rank()
    state = model_state(rank)
    vllm_host.AgentSettings = live.settings
    group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, cpu_group=dist.group.WORLD)
    parallel = SimpleNamespace(data_parallel_size=1, prefill_context_parallel_size=1)
    return state, vllm_host.VllmHost(state, parallel, group)


def consistent(state, rank):
    """Whether tables lead to slots that hold the expert, by vLLM's own map, and weights are that expert's."""
    for layer in range(LAYERS):
        phy2log_P = state.physical_to_logical_map[layer]
        if not torch.equal(phy2log_P[state.logical_to_physical_map[layer, :, 0]], torch.arange(EXPERTS)):
            return False
        mine = phy2log_P[rank * SLOTS : (rank + 1) * SLOTS].float() + 100 * layer
        if not torch.equal(state.model.expert_weights[layer][0], mine[:, None].repeat(1, 8)):
            return False
    return True


def switched_and_restored():
    rank = dist.get_rank()
    state, host = started()
    tensors = (state.physical_to_logical_map, state.logical_to_physical_map, state.model.expert_weights[0][0])
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = state.physical_to_logical_map.clone()
    found = {"counts": state.logical_replica_count.unique().tolist(), "at first": consistent(state, rank)}
    state.expert_load_pass[:, 3] = 5
    for _ in range(3):
        host.step(is_dummy=False)
    other = Placement(host.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), EXPERTS)
    host.agent.restore(other, "the test wants it so")
    host.resume()
    found["switched"] = not torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    host.step(is_dummy=True)
    host.restore()
    found["restored"] = torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    found["same tensors"] = addresses == [tensor.data_ptr() for tensor in tensors]
    # Expert 3 was chosen five times a pass; of ranks that share their tokens the first counts them, dummies count not.
    found["heat"] = host._heat.sources_LWE[0, :4, 3].tolist()
    host.close()
    return found


def test_vllm_s_tables_maps_and_weights_follow_a_switch():
    found = run_ranks(RANKS, switched_and_restored)
    for rank, facts in enumerate(found):
        assert facts.pop("heat") == ([5, 5, 5, 0] if rank == 0 else [0] * 4)
        assert facts.pop("counts") == [1]
        assert set(facts.values()) == {True}, (rank, facts)


def kernels_change():
    state, host = started()
    host.confirm_dispatch()
    state.model.moe_layers[0].moe_config.is_sequence_parallel = True
    try:
        host.step(is_dummy=False)
    except UnsupportedEngineError as error:
        return str(error)
    finally:
        host.close()


def test_kernels_that_dispatch_otherwise_than_at_the_start_are_refused():
    for said in run_ranks(RANKS, kernels_change):
        assert "changed after the model was loaded" in said


def test_a_kernel_that_routes_inside_is_refused():
    group = SimpleNamespace(rank_in_group=0, world_size=RANKS, cpu_group=None)
    with pytest.raises(UnsupportedEngineError, match="monolithic kernel"):
        vllm_host.VllmHost(model_state(0, monolithic=True), SimpleNamespace(), group)
