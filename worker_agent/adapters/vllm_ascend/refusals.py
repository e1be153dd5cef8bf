"""Refusals of releases, settings and weights of vLLM-Ascend that cannot be balanced, before a token could be wrong."""

from __future__ import annotations

import os
from typing import Any

from worker_agent.adapters.compat import read_known, refuse, refuse_cut_models
from worker_agent.adapters.engine_host import ignored_settings

KNOWN = read_known("worker_agent.adapters.vllm_ascend")
"""Functions that the adapter patches or relies on, by release."""


def refuse_settings(eplb_config: Any) -> None:
    """Raise ``UnsupportedEngineError`` where a setting of the host does not go with the agent."""
    from vllm.config import get_current_vllm_config
    from vllm_ascend import envs
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import get_ascend_device_type

    config, vllm_config = get_ascend_config(), get_current_vllm_config()
    refuse_cut_models(vllm_config)
    refuse_gathering(vllm_config, int(eplb_config.num_redundant_experts))
    refuse(
        [
            (
                bool(eplb_config.expert_map_record_path)
                or os.environ.get("EXPERT_MAP_RECORD", "false") == "true",
                "recording of expert maps (EXPERT_MAP_RECORD)",
                "The host then never installs what it plans",
                "Record with `eplb trace record`",
            ),
            (
                bool(getattr(config, "enable_fused_mc2", getattr(envs, "VLLM_ASCEND_ENABLE_FUSED_MC2", 0))),
                "fused MC2",
                "It dispatches inside a kernel, with weights in a layout of its own",
                "Unset enable_fused_mc2 and VLLM_ASCEND_ENABLE_FUSED_MC2",
            ),
            (
                bool(getattr(config, "mix_placement", False)),
                "mix_placement",
                "Shared experts are then placed among the routed ones",
                "Turn it off",
            ),
            (
                get_ascend_device_type().name == "_310P",
                "Atlas 300I (310P)",
                "It dispatches grouped experts (MoGE), whose replicas must stay in their group",
                "Use A2, A3 or A5",
            ),
            (
                bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
                "sleep mode",
                "Weights may leave the device, or come back in their first layout, while experts move",
                "Start without --enable-sleep-mode",
            ),
            (
                vllm_config.model_config.runner_type == "pooling",
                "a pooling model",
                "vLLM-Ascend does not call its balancer after a forward pass of one",
                "Serve it without dynamic_eplb",
            ),
        ]
    )
    if vllm_config.parallel_config.rank == 0:
        ignored_settings("vLLM-Ascend", eplb_config.config, eplb_config._defaults)


def refuse_gathering(vllm_config: Any, redundant: int) -> None:
    """Reject redundant experts if the host would choose to gather tokens in its largest step.

    The check runs before the model is loaded, because the host itself would fail only in its profile run. Release 0.18
    has no such choice.
    """
    if not redundant:
        return
    try:
        from vllm_ascend.ascend_forward_context import select_moe_comm_method
    except ImportError:
        return
    tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
    chosen = select_moe_comm_method(tokens, vllm_config)
    refuse(
        [
            (
                chosen is not None and chosen.name == "ALLGATHER",
                f"all-gather dispatch of steps of up to {tokens} tokens with {redundant} redundant experts",
                "vLLM-Ascend then looks up physical ids in a map of logical experts",
                "On A2 use at least 16 ranks with at most 24 experts each, set --max-num-batched-tokens to at most 512 "
                "for each tensor-parallel rank, and enable_prefill_mc2 in --additional-config; or set "
                "num_redundant_experts to 0",
            )
        ]
    )


def refuse_misread_lists(w1_scale: Any, w2_scale: Any, mc2: bool, kernel_for_lists: bool) -> None:
    """Refuse scales of which the host would use the first expert's for all, or replace one in its list.

    Under dynamic EPLB they are lists of a tensor per local slot. Without its own ``kernel_for_lists`` the host makes do
    with kernels for single tensors.
    """
    if kernel_for_lists or not isinstance(w1_scale, list) or len(w1_scale) < 2:
        return
    remedy = "Install vLLM-Ascend with its custom operators and leave fusion_ops_gmmswigluquant on"
    refuse(
        [
            (
                mc2,
                "quantised experts under MC2 without vLLM-Ascend's kernel for lists of experts",
                "It then takes the first expert's scales for all of a rank's experts, and answers wrongly",
                remedy,
            ),
            (
                w1_scale[0].dtype != w2_scale[0].dtype,
                "quantised experts whose tensors vLLM-Ascend replaces while it serves",
                "Without its kernel for lists it converts the first expert's scales on first use, and puts them into a "
                "new tensor",
                remedy,
            ),
        ]
    )
