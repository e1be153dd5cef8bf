"""vLLM's functions that the adapter patches or relies on; ``known.json`` says how each known release has them.

The file is written by ``tools/engine_fingerprints.py`` from that release's source, once ``tests/engines`` pass on it;
of 0.33, which has no build for CPUs, once what had changed since 0.32 was read.
"""

from __future__ import annotations

from worker_agent.adapters.compat import read_known

_EPLB = "vllm.distributed.eplb.eplb_state"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"

TARGETS = (
    # patched
    f"{_EPLB}:EplbState.add_model",
    f"{_EPLB}:EplbState.step",
    f"{_EPLB}:EplbState.rearrange",
    f"{_EPLB}:EplbState.start_async_loop",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.update_weights",
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    # relied on: who calls step, how choices are mapped and counted, what is dispatched, which tensors are an expert
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.eplb_step",
    "vllm.v1.worker.gpu.eplb_utils:step_eplb_after",
    "vllm.v1.worker.gpu.eplb_utils:EPLBController.step",
    "vllm.v1.worker.gpu.eplb_utils:EPLBController.maybe_register_model",
    f"{_EPLB}:EplbState.build_initial_global_physical_to_logical_map",
    f"{_EPLB}:EplbLayerState.set_layer_state",
    "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._apply_eplb_mapping",
    f"{_RUNNER}.do_naive_dispatch_combine",
    f"{_RUNNER}._maybe_dispatch",
    f"{_RUNNER}.get_expert_weights",
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.get_expert_weights",
    "vllm.model_executor.layers.fused_moe.layer:FusedMoE.get_expert_weights",
)
"""As ``module:name``; a release that moved a function has it under one of several."""

KNOWN = read_known("worker_agent.adapters.vllm")
