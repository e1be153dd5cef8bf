"""Make real vLLM run expert parallelism with EPLB on CPU, for tests only. Entry point in ``vllm.general_plugins``.

vLLM's CPU build rejects expert parallelism and EPLB in a few places. The kernels, scheduler, workers, runners, routers
and the HTTP server are the real ones.
"""

from __future__ import annotations

import contextlib
import inspect
import os

import torch
import torch.distributed as dist


def register() -> None:
    """Patch this process. vLLM calls this function in each of its processes."""
    _fork()
    _allow_eplb()
    _experts_follow_the_expert_map()
    _routers_map_and_record()
    _runner_builds_eplb_state()
    _communicator_gathers_uneven_parts()
    _own_eplb_runs()
    if os.environ.get("EPLB_TEST_MEASURE"):
        from measure_eplb import measure_vllm

        measure_vllm()
    if os.environ.get("EPLB_TEST_COMMIT_WITHOUT_WEIGHTS"):
        from commit_without_weights import commit_without_weights

        commit_without_weights()
    if os.environ.get("EPLB_TEST_IGNORE_LAST_RANK"):
        _split_without_last_rank()


def _split_without_last_rank() -> None:
    """A deliberate bug that the tests must detect: the split per step ignores the counts of the last rank."""
    from worker_agent.adapters.vllm import step_split

    original = step_split._EpRanks.all_gather

    def all_gather(self, rows_TX):
        gathered = original(self, rows_TX)
        gathered[-1] = 0
        return gathered

    step_split._EpRanks.all_gather = all_gather


def _own_eplb_runs() -> None:
    """Add the streams and events that vLLM's own EPLB uses, because CPU builds of torch have none."""
    from vllm.distributed.eplb import eplb_state

    class Stream:
        def synchronize(self):
            pass

    class Event:
        def __init__(self, *arguments, **named):
            pass

        def record(self, *arguments, **named):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end_event):
            return 0.0

    class TorchWithEvents:
        def __getattr__(self, name):
            return Event if name == "Event" else getattr(torch, name)

    torch.accelerator.current_stream = lambda *_, **__: Stream()
    eplb_state.torch = TorchWithEvents()


def _fork() -> None:
    """Start processes by forking, which is the default on accelerators.

    With the CPU platform's default, each process would import everything again.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _allow_eplb() -> None:
    """Allow EPLB on CPU, although ``ParallelConfig`` only accepts it on CUDA-like platforms."""
    import vllm.config.parallel as parallel

    real = parallel.current_platform

    class CudaLike:
        def __getattr__(self, name):
            return getattr(real, name)

        def is_cuda_alike(self):
            return True

    parallel.current_platform = CudaLike()


def _experts_follow_the_expert_map() -> None:
    """Map physical ids to local slots and ignore other ranks' choices, because the CPU kernel is not aware of ranks."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if not hasattr(cpu_moe, "CPUUnquantizedExperts"):
        _experts_of_old_releases_follow_the_router()
        return
    if cpu_moe.CPUUnquantizedExperts.is_monolithic():
        _experts_take_choices(cpu_moe)
    original = cpu_moe.CPUUnquantizedExperts.apply

    parameters = inspect.signature(original)

    def apply(self, *arguments, **named):
        call = parameters.bind(self, *arguments, **named)
        expert_map = call.arguments["expert_map"]
        if expert_map is not None:
            weights, ids = _local(expert_map, call.arguments["topk_weights"], call.arguments["topk_ids"])
            call.arguments["topk_weights"] = weights
            call.arguments["topk_ids"] = ids
            call.arguments["expert_map"] = None
            if call.arguments.get("apply_router_weight_on_input"):
                # The inputs are already weighted and the kernel ignores the weights, so rows for other ranks' choices
                # must be zero.
                call.arguments["hidden_states"] = call.arguments["hidden_states"] * (weights != 0)
        return original(*call.args, **call.kwargs)

    cpu_moe.CPUUnquantizedExperts.apply = apply


def _local(expert_map, weights, ids):
    """Return the weights and ids for a kernel that only handles this rank's slots."""
    local = expert_map.to(ids.device)[ids.long()]
    return (
        torch.where(local >= 0, weights, torch.zeros_like(weights)).contiguous(),
        local.clamp(min=0).to(torch.int32).contiguous(),
    )


def _experts_take_choices(cpu_moe) -> None:
    """Make the CPU experts of 0.28 and 0.29 take the router's choices, although they route internally.

    The router then calls the same function as these experts did, also without expert parallelism.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.v1.worker.workspace import init_workspace_manager

    def workspace_shapes(self, M, N, K, *_):
        return (0,), (0,), (M, K)

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ):
        sums = cpu_moe.cpu_fused_moe(
            hidden_states,
            w1,
            w2,
            self.w1_bias,
            self.w2_bias,
            topk_weights,
            topk_ids,
            activation.value,
            self.isa,
            apply_router_weight_on_input,
        )
        output.copy_(sums)

    experts = cpu_moe.CPUUnquantizedExperts
    experts.__bases__ = (modular_kernel.FusedMoEExpertsModular,)
    experts.workspace_shapes = workspace_shapes
    experts.finalize_weight_and_reduce_impl = lambda self: TopKWeightAndReduceNoOP()
    experts.apply = apply
    # Experts that take choices allocate their output here. The CPU workers of these releases do not set it up.
    init_workspace_manager(torch.device("cpu"))
    _route_by(cpu_moe.select_experts)


def _route_by(select_experts) -> None:
    """Replace the GPU kernel of vLLM's router."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    def compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return select_experts(
            hidden_states,
            router_logits,
            self.top_k,
            use_grouped_topk=False,
            renormalize=self.renormalize,
            scoring_func=self.scoring_func,
        )

    FusedTopKRouter._compute_routing = compute_routing


def _experts_of_old_releases_follow_the_router() -> None:
    """Make 0.23 to 0.27 use vLLM's router under expert parallelism, although their CPU kernel routes internally."""
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        weights, ids = _local(layer.expert_map, topk_weights, topk_ids)
        # Use one row per choice, because the kernel without AVX-512 counts an expert only once if a row names it twice.
        choices = ids.shape[1]
        outputs = self.cpu_fused_moe.forward_method(
            layer,
            x.repeat_interleave(choices, dim=0),
            weights.reshape(-1, 1),
            ids.reshape(-1, 1),
            layer.activation,
            layer.global_num_experts,
            False,
        )
        return outputs.view(-1, choices, x.shape[-1]).sum(dim=1)

    def silu_and_mul(rows):
        gate, up = rows.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    # Without AVX-512, the kernel is plain torch. In each pass, its own SiLU reads a configuration that no longer exists
    # by then.
    cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU] = silu_and_mul
    UnquantizedFusedMoEMethod.is_monolithic = property(lambda self: not self.moe.moe_parallel_config.use_ep)
    UnquantizedFusedMoEMethod.apply = apply
    _route_by(cpu_fused_moe.select_experts)


def _routers_map_and_record() -> None:
    """Do the work of vLLM's Triton kernel in plain torch, because vLLM's CPU version returns the ids unchanged."""
    from vllm.model_executor.layers.fused_moe.router import base_router

    def map_and_record(
        topk_ids,
        expert_load_view,
        logical_to_physical_map,
        logical_replica_count,
        record_enabled,
        num_unpadded_tokens=None,
    ):
        token = torch.arange(topk_ids.shape[0], dtype=torch.int64).unsqueeze(1)
        ids = topk_ids.long()
        replica = ((token * 2654435769) & 0xFFFFFFFF) % logical_replica_count[ids].clamp(min=1)
        physical = logical_to_physical_map[ids, replica]
        if bool(record_enabled):
            real = topk_ids.shape[0] if num_unpadded_tokens is None else int(num_unpadded_tokens)
            counted = physical[:real].reshape(-1)
            expert_load_view.index_add_(0, counted, torch.ones_like(counted, dtype=expert_load_view.dtype))
        return physical.to(topk_ids.dtype)

    base_router.eplb_map_to_physical_and_record = map_and_record


def _runner_builds_eplb_state() -> None:
    """Add the EPLB part of ``GPUModelRunner.load_model``, which ``CPUModelRunner.load_model`` omits."""
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.models import interfaces
    from vllm.v1.worker import cpu_model_runner

    original = cpu_model_runner.CPUModelRunner.load_model

    def load_model(self, *arguments, **named):
        original(self, *arguments, **named)
        if not self.parallel_config.enable_eplb:
            return
        with getattr(cpu_model_runner, "_torch_cuda_wrapper", contextlib.nullcontext)():
            self.eplb_state = EplbState(self.parallel_config, self.device)
        # Release 0.23 finds the experts of multimodal models inline and has no separate function.
        find = getattr(interfaces, "get_mixture_of_experts_model", lambda model: model)
        self._moe_model = find(self.model)
        self.eplb_state.add_model(self._moe_model, self.model_config)

    cpu_model_runner.CPUModelRunner.load_model = load_model


def _communicator_gathers_uneven_parts() -> None:
    """Add ``all_gatherv`` and ``reduce_scatterv``, which data-parallel experts need, to the CPU communicator."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, parts, dim=0, sizes=None):
        if isinstance(parts, (list, tuple)):
            return [all_gatherv(self, part, dim, sizes) for part in parts]
        assert dim == 0
        sizes = sizes or [parts.shape[0]] * self.world_size
        padded = parts.new_zeros((max(sizes), *parts.shape[1:]))
        padded[: parts.shape[0]] = parts
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(self, whole, dim=0, sizes=None):
        assert dim == 0
        sizes = sizes or [whole.shape[0] // self.world_size] * self.world_size
        total = whole.contiguous().clone()
        dist.all_reduce(total, group=self.device_group)
        start = sum(sizes[: self.rank_in_group])
        return total[start : start + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
