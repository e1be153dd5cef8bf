"""Fakes of the vLLM objects that the adapter uses, including the MoE layers' routers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.adapters.sglang_fakes import put_modules
from tests.agent import live
from worker_agent.adapters import engine_host
from worker_agent.adapters.vllm import hooks
from worker_agent.adapters.vllm.host import VllmHost

LAYERS = 2
EXPERTS = 6
SLOTS = 4
RANKS = 2


def layer(naive=False, sequence_parallel=False, monolithic=False):
    """Return a layer's runner with these dispatch flags."""
    return SimpleNamespace(
        do_naive_dispatch_combine=naive,
        is_monolithic=monolithic,
        moe_config=SimpleNamespace(is_sequence_parallel=sequence_parallel),
    )


def config(data_parallel=1, prefill_context=1):
    """Return a fake ``ParallelConfig``."""
    return SimpleNamespace(data_parallel_size=data_parallel, prefill_context_parallel_size=prefill_context)


def scheduled(counts, drafts=None):
    """Return a ``SchedulerOutput`` that schedules ``counts`` tokens for its requests."""
    tokens_by_request = {str(number): count for number, count in enumerate(counts)}
    return SimpleNamespace(
        num_scheduled_tokens=tokens_by_request,
        total_num_scheduled_tokens=sum(counts),
        scheduled_spec_decode_tokens={str(number): [-1] * k for number, k in (drafts or {}).items()},
    )


def hooked_router():
    """Return a fake ``BaseRouter`` class with the adapter's hook."""

    class BaseRouter:
        def _apply_eplb_mapping(self, topk_ids):
            return topk_ids if isinstance(topk_ids, str) else mapped(self.tables, topk_ids)

    with pytest.MonkeyPatch.context() as patch:
        name = "vllm.model_executor.layers.fused_moe.router.base_router"
        put_modules(patch, {name: {"BaseRouter": BaseRouter}})
        hooks._count_passes()
    return BaseRouter


def mapped(tables, topk_ids):
    """Return the physical ids that vLLM's kernel picks. It hashes the row, modulo the expert's replica count."""
    map_EX, count_E = tables
    row_T1 = torch.arange(topk_ids.shape[0]).unsqueeze(1)
    ids = topk_ids.long()
    # Use floats: a queued device infers shapes from zeros, and an integer remainder by zero raises an error.
    column_TK = ((row_T1 * 2654435769) & 0xFFFFFFFF).double() % count_E[ids].double()
    return map_EX[ids, column_TK.long()]


def model_state(rank, place=lambda tensor: tensor, naive=False):
    """Return the state that ``EplbState.add_model`` of 0.23 creates. Expert weights equal the expert number.

    ``place`` converts each tensor, for example to a tensor on a device.
    """
    first = torch.arange(RANKS * SLOTS) % EXPERTS
    experts_S = first[rank * SLOTS : (rank + 1) * SLOTS].float()
    router = hooked_router()
    layers = [layer(naive) for _ in range(LAYERS)]
    for runner in layers:
        runner.router = router()
    weights = [[place(experts_S[:, None].repeat(1, 8) + 100 * index)] for index in range(LAYERS)]
    map_LEX = place(torch.full((LAYERS, EXPERTS, 4), -1))
    count_LE = place(torch.full((LAYERS, EXPERTS), 2))
    for index, runner in enumerate(layers):
        runner.router.tables = map_LEX[index], count_LE[index]
    return SimpleNamespace(
        model=SimpleNamespace(moe_layers=layers, expert_weights=weights),
        physical_to_logical_map=place(first.repeat(LAYERS, 1)),
        logical_to_physical_map=map_LEX,
        logical_replica_count=count_LE,
        expert_load_pass=place(torch.zeros((LAYERS, RANKS * SLOTS), dtype=torch.int32)),
    )


def run_pass(state, layers=LAYERS, parts=1):
    """Run one forward pass of the routers in the first ``layers`` layers, with the batch split into ``parts`` parts."""
    for runner in state.model.moe_layers[:layers]:
        for _ in range(parts):
            runner.router._apply_eplb_mapping("choices")


def all_gather(rows_TX, dim=0):
    """Return the rows of all ranks."""
    gathered = [torch.empty_like(rows_TX) for _ in range(RANKS)]
    dist.all_gather(gathered, rows_TX)
    return torch.cat(gathered, dim)


def started(place=lambda tensor: tensor, state=None, data_parallel=1, is_pooling=False, **changes):
    """Return this rank's state and its host. ``changes`` are agent settings."""
    rank = dist.get_rank()
    state = state or model_state(rank, place)
    engine_host.AgentSettings = lambda: live.settings(**changes)
    world = dist.group.WORLD
    groups = {"cpu_group": world, "device_group": world, "all_gather": all_gather}
    group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, **groups)
    return state, VllmHost(state, config(data_parallel), group, is_pooling=is_pooling)


VLLM = {"__version__": "0.32.0", "envs": SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)}


def modules(monkeypatch, vllm=VLLM, **named):
    """Install a fake ``vllm`` and other fake modules; ``named`` maps full names to the modules' attributes."""
    put_modules(monkeypatch, {"vllm": vllm, **named})


@dataclass
class EplbConfig:
    num_redundant_experts: int = 0
    step_interval: int = 3000
    log_balancedness: bool = False
    communicator: str | None = None


def vllm_config(lora=None, **settings):
    defaults = {"enable_eplb": True, "pipeline_parallel_size": 1, "eplb_config": EplbConfig()}
    return SimpleNamespace(parallel_config=SimpleNamespace(**defaults | settings), lora_config=lora)
