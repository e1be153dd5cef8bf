"""CPU time that the adapter and the agent add to each step on a host with many layers.

The host consists of vLLM's tensors as the adapter sees them, at the size of a large model, but without the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.switch.ratios import Ratio, means_of
from worker_agent.adapters.engine_host import RING_ROWS
from worker_agent.adapters.vllm.host import VllmHost
from worker_agent.stream import Outbox

LAYERS = 58
EXPERTS = 256
SLOTS = 144
LONGEST_MICROSECONDS = 100
STEPS_OF_REPORT = 16
_BUDGET_SECONDS = LONGEST_MICROSECONDS * 1e-6


def model_state(ranks: int, device: torch.device) -> SimpleNamespace:
    """Return vLLM's ``EplbModelState`` with 58 layers of 256 experts, as ``EplbState.add_model`` creates it."""
    slots = np.arange(ranks * SLOTS) % EXPERTS
    phy2log_LP = torch.from_numpy(np.tile(slots, (LAYERS, 1))).to(device)
    layers = [
        SimpleNamespace(
            do_naive_dispatch_combine=False,
            is_monolithic=False,
            moe_config=SimpleNamespace(is_sequence_parallel=False),
            router=SimpleNamespace(eplb_agent_layer=None),
        )
        for _ in range(LAYERS)
    ]
    return SimpleNamespace(
        model=SimpleNamespace(
            moe_layers=layers,
            expert_weights=[[torch.zeros(SLOTS, 8, device=device)] for _ in range(LAYERS)],
        ),
        physical_to_logical_map=phy2log_LP,
        logical_to_physical_map=torch.full((LAYERS, EXPERTS, 1024), -1, device=device),
        logical_replica_count=torch.ones((LAYERS, EXPERTS), dtype=torch.int64, device=device),
        expert_load_pass=torch.zeros((LAYERS, ranks * SLOTS), dtype=torch.int32, device=device),
    )


def device_copies(
    chosen_LP: torch.Tensor, phy2log_LP: torch.Tensor, ring_LWE: torch.Tensor, step: int
) -> None:
    """Run the device operations that any host needs for counting choices per expert and copying 16 steps of counts."""
    row = step % RING_ROWS
    row_LE = ring_LWE[:, row]
    row_LE.zero_()
    row_LE.scatter_add_(1, phy2log_LP, chosen_LP)
    chosen_LP.zero_()
    if row % STEPS_OF_REPORT == STEPS_OF_REPORT - 1:
        ring_LWE[:, row + 1 - STEPS_OF_REPORT : row + 1].transpose(0, 1).contiguous()


def counting(counted: Sequence[tuple[Any, int, int]], device: torch.device) -> Callable[[], None]:
    """Return a function that counts one pass in every layer. On a GPU, it replays a graph, as the model's pass does."""

    def count() -> None:
        for heat, index, layers in counted:
            heat.layer_runs(index, layers)

    if device.type != "cuda":
        return count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count()
    return graph.replay


def overhead(steps: int, device: torch.device) -> tuple[Ratio, dict[str, object]]:
    """Compare the CPU time of counting a pass and of the call that follows, excluding device copies, with a budget.

    The model thread's CPU time does not depend on other load. Wall-clock time is only returned for information.
    Counting a pass within a graph takes no CPU time.
    """
    ranks = dist.get_world_size()
    state = model_state(ranks, device)
    group = SimpleNamespace(rank_in_group=dist.get_rank(), world_size=ranks, cpu_group=dist.group.WORLD)
    parallel = SimpleNamespace(data_parallel_size=ranks, prefill_context_parallel_size=1)
    host = VllmHost(state, parallel, group)
    # As with a service that keeps up, memory from sent reports is reused for later ones.
    host.agent._outbox = Outbox(heat_reports=1)
    ring_LWE = torch.zeros((LAYERS, RING_ROWS, EXPERTS), dtype=torch.int32, device=device)
    chosen_LP = torch.zeros_like(state.expert_load_pass)
    routers = (layer.router for layer in state.model.moe_layers)
    count = counting(
        [router.eplb_agent_layer for router in routers if router.eplb_agent_layer is not None], device
    )
    calls = []
    copies = []
    clock = []
    for step in range(steps):
        # Between two calls the model runs a pass, in which routers read their tables and the ranks synchronise.
        state.logical_to_physical_map[:, :, 0].sum()
        dist.barrier()
        state.expert_load_pass.fill_(3)
        chosen_LP.fill_(3)
        began = time.thread_time()
        count()
        counted = time.thread_time() - began if device.type != "cuda" else 0.0
        time.sleep(0.001)
        began = time.thread_time()
        began_clock = time.perf_counter()
        host.step(is_dummy=False)
        state.expert_load_pass.zero_()
        middle = time.thread_time()
        clock.append(time.perf_counter() - began_clock)
        # Pause before the copies, as before the call, so that other processes affect the caches equally in both cases.
        time.sleep(0.001)
        began_copies = time.thread_time()
        device_copies(chosen_LP, state.physical_to_logical_map, ring_LWE, step)
        calls.append(middle - began + counted)
        copies.append(time.thread_time() - began_copies)
    dist.barrier()
    halted = host.agent.halted
    host.close()
    if halted is not None:
        raise RuntimeError(f"the agent halted: {halted}")
    # Average over the steps that share one heat report and one vote.
    extra = np.subtract(*(means_of(seconds, STEPS_OF_REPORT) for seconds in (calls, copies)))
    ratio = Ratio.of(
        f"{LAYERS}-layer host: agent and adapter except device copies / {LONGEST_MICROSECONDS} us",
        extra.tolist(),
        [_BUDGET_SECONDS] * len(extra),
        1.0,
    )
    figures: dict[str, object] = {
        "host58_call_cpu_us_mean": 1e6 * float(np.mean(calls)),
        "host58_device_copies_cpu_us_mean": 1e6 * float(np.mean(copies)),
        "host58_call_clock_us_median": 1e6 * float(np.median(clock)),
    }
    return ratio, figures
