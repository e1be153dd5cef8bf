"""vLLM-Ascend's functions that the adapter patches or relies on; ``known.json`` has them as each release had them.

The file is written by ``tools/engine_fingerprints.py`` from that release's source, once ``tests/engines`` pass on it.
"""

from __future__ import annotations

from worker_agent.adapters.compat import read_known

_FUSED_MOE = "vllm_ascend.ops.fused_moe"
_UPDATOR = "vllm_ascend.eplb.eplb_updator:EplbUpdator"

TARGETS = (
    # replaced: the balancer's parts, as the model runner makes and calls them
    f"{_UPDATOR}.__init__",
    f"{_UPDATOR}.set_adaptor",
    f"{_UPDATOR}.warm_up_eplb",
    f"{_UPDATOR}.forward_before",
    f"{_UPDATOR}.forward_end",
    f"{_UPDATOR}.shutdown",
    "vllm_ascend.eplb.core.eplb_worker:EplbProcess.__init__",
    "vllm_ascend.eplb.core.eplb_worker:EplbProcess._launch_process",
    "vllm_ascend.eplb.adaptor.vllm_adaptor:VllmEplbAdaptor.__init__",
    # wrapped
    f"{_FUSED_MOE}.moe_comm_method:MoECommMethod.fused_experts",
    "vllm_ascend.worker.worker:NPUWorker.start_weight_update",
    "vllm_ascend.worker.worker:NPUWorker.update_weights",
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner._dummy_run",
    # relied on: who calls the balancer's parts, how the first maps are made, where tokens are counted, which tensors
    # an expert is made of
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner.eplb_warmup",
    "vllm_ascend.eplb.core.eplb_utils:init_eplb_config",
    "vllm_ascend.eplb.core.eplb_utils:generate_log2phy_map",
    "vllm_ascend.eplb.adaptor.vllm_adaptor:VllmEplbAdaptor.init_expert_param_per_layer",
    f"{_FUSED_MOE}.fused_moe:AscendFusedMoE.clear_moe_load",
    f"{_FUSED_MOE}.fused_moe:AscendFusedMoE.forward_impl",
    f"{_FUSED_MOE}.fused_moe_0_23_0:AscendFusedMoE.clear_moe_load",
    f"{_FUSED_MOE}.fused_moe_0_23_0:AscendFusedMoE.forward_impl",
    f"{_FUSED_MOE}.moe_mlp:quant_apply_mlp",
    f"{_FUSED_MOE}.moe_mlp:_custom_gmm_swiglu_enabled",
    f"{_FUSED_MOE}.token_dispatcher:TokenDispatcherWithMC2.token_dispatch",
    f"{_FUSED_MOE}.token_dispatcher:TokenDispatcherWithAll2AllV.token_dispatch",
    f"{_FUSED_MOE}.token_dispatcher:TokenDispatcherWithAllGather.token_dispatch",
    f"{_FUSED_MOE}.prepare_finalize:PrepareAndFinalizeWithMC2.prepare",
    f"{_FUSED_MOE}.prepare_finalize:PrepareAndFinalizeWithAll2All.prepare",
    f"{_FUSED_MOE}.prepare_finalize:PrepareAndFinalizeWithAllGather.prepare",
)
"""As ``module:name``; a release that moved a function has it under one of several."""

KNOWN = read_known("worker_agent.adapters.vllm_ascend")
