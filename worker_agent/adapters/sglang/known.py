"""SGLang's functions that the adapter hooks or relies on; ``known.json`` says how each known release has them.

The file is written by ``tools/engine_fingerprints.py`` from that release's source, once ``tests/engines`` pass on it.
"""

from __future__ import annotations

from worker_agent.adapters.compat import read_known

_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_OCCUPATION = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_LOCATION = "sglang.srt.eplb.expert_location"
_DISPATCH = "sglang.srt.eplb.expert_location_dispatch"
_RECORDER = "sglang.srt.eplb.expert_distribution"

TARGETS = (
    # hooked
    f"{_RUNNER}.maybe_init_eplb_manager",
    f"{_RUNNER}.initialize",
    f"{_RUNNER}.forward",
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.load_weights_from_distributed",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.begin_weight_update",
    f"{_UPDATER}.end_weight_update",
    f"{_OCCUPATION}.release_memory_occupation",
    f"{_OCCUPATION}.resume_memory_occupation",
    # relied on: how plugins are called and hooks applied, what the manager that is replaced does, who else calls it
    "sglang.srt.plugins:load_plugins",
    "sglang.srt.plugins.hook_registry:HookRegistry.register",
    "sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks",
    "sglang.srt.eplb.eplb_manager:EPLBManager.__init__",
    "sglang.srt.eplb.eplb_manager:EPLBManager.on_forward_pass_end",
    f"{_RUNNER}.maybe_init_expert_location_metadata",
    # the tables, and who reads which of them
    f"{_LOCATION}:ExpertLocationMetadata._init_raw",
    f"{_LOCATION}:ExpertLocationMetadata.update",
    f"{_LOCATION}:ExpertLocationMetadata.logical_to_all_physical",
    f"{_DISPATCH}:ExpertLocationDispatchInfo.init_new",
    f"{_DISPATCH}:topk_ids_logical_to_physical",
    f"{_DISPATCH}:_topk_ids_logical_to_physical_static",
    f"{_DISPATCH}:_topk_ids_logical_to_physical_dynamic",
    "sglang.srt.layers.moe.topk:_post_process_topk_ids",
    "sglang.srt.layers.moe.topk:resolve_routing_inputs",
    "sglang.srt.layers.moe.utils:is_moe_input_scattered_across_dp_ranks",
    "sglang.srt.arg_groups.parallel_hook:handle_eplb_and_dispatch",
    # how choices are counted
    f"{_RECORDER}:should_record_forward_pass",
    f"{_RECORDER}:_ExpertDistributionRecorderReal.__init__",
    f"{_RECORDER}:_ExpertDistributionRecorderReal._on_forward_pass_start",
    f"{_RECORDER}:_ExpertDistributionRecorderReal._on_forward_pass_end",
    f"{_RECORDER}:_ExpertDistributionRecorderReal._on_hook",
    f"{_RECORDER}:_SinglePassGatherer.init_new",
    f"{_RECORDER}:_LayerBasedGpuSinglePassGatherer.__init__",
    f"{_RECORDER}:_LayerBasedGpuSinglePassGatherer.reset",
    f"{_RECORDER}:_SelectExpertsSinglePassGatherer.on_select_experts",
    f"{_RECORDER}:_DeepepLowLatencySinglePassGatherer.on_deepep_dispatch_low_latency",
    # which tensors an expert is made of, and which slots a load writes
    "sglang.srt.layers.moe.utils:filter_moe_weight_param_global_expert",
    "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE.weight_loader",
    "sglang.srt.eplb.expert_location_updater:update_expert_weights_single_layer",
)
"""As ``module:name``."""

KNOWN = read_known("worker_agent.adapters.sglang")
