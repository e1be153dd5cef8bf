"""Refuse vLLM-Ascend settings and quantised weights that would give wrong outputs or cannot be balanced."""

from __future__ import annotations

import os
from typing import Any

from worker_agent.adapters.compat import read_known, refuse, refuse_split_models
from worker_agent.adapters.engine_host import warn_of_ignored_settings

KNOWN = read_known("worker_agent.adapters.vllm_ascend")
"""Functions that the adapter patches or relies on, by release."""


def refuse_settings(eplb_config: Any) -> None:
    """Raise ``UnsupportedEngineError`` if a setting of vLLM-Ascend does not work with the agent.

    Parameters
    ----------
    eplb_config
        vLLM-Ascend's ``EplbConfig``.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    refuse_split_models(vllm_config)
    refuse_gathering(vllm_config, int(eplb_config.num_redundant_experts))
    _refuse_ascend_settings(eplb_config)
    _refuse_vllm_settings(vllm_config)
    if vllm_config.parallel_config.rank == 0:
        warn_of_ignored_settings("vLLM-Ascend", eplb_config.config, eplb_config._defaults)


def _refuse_ascend_settings(eplb_config: Any) -> None:
    """Refuse unsupported vLLM-Ascend settings and NPU models."""
    from vllm_ascend import envs
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import get_ascend_device_type

    config = get_ascend_config()
    refuse(
        [
            (
                bool(eplb_config.expert_map_record_path)
                or os.environ.get("EXPERT_MAP_RECORD", "false") == "true",
                "recording of expert maps (EXPERT_MAP_RECORD)",
                "While it records maps, vLLM-Ascend never installs the placements that it plans",
                "Record with `eplb trace record`",
            ),
            (
                bool(getattr(config, "enable_fused_mc2", getattr(envs, "VLLM_ASCEND_ENABLE_FUSED_MC2", 0))),
                "fused MC2",
                "It dispatches inside a kernel that needs the weights in a special layout",
                "Unset enable_fused_mc2 and VLLM_ASCEND_ENABLE_FUSED_MC2",
            ),
            (
                bool(getattr(config, "mix_placement", False)),
                "mix_placement",
                "It places shared experts among the routed ones",
                "Turn mix_placement off",
            ),
            (
                get_ascend_device_type().name == "_310P",
                "Atlas 300I (310P)",
                "It dispatches grouped experts (MoGE), whose replicas must stay in their group",
                "Use A2, A3 or A5",
            ),
        ]
    )


def _refuse_vllm_settings(vllm_config: Any) -> None:
    """Refuse settings of the underlying vLLM."""
    refuse(
        [
            (
                bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
                "sleep mode",
                "Weights may leave the device, or be restored in their initial layout, while experts move",
                "Start without --enable-sleep-mode",
            ),
            (
                vllm_config.model_config.runner_type == "pooling",
                "a pooling model",
                "vLLM-Ascend does not call its balancer after the forward passes of pooling models",
                "Serve it without dynamic_eplb",
            ),
        ]
    )


def refuse_gathering(vllm_config: Any, redundant: int) -> None:
    """Refuse redundant experts if vLLM-Ascend would choose all-gather dispatch for its largest step.

    The check runs before the model is loaded, because vLLM-Ascend itself would fail only in its profile run. The
    check is skipped if vLLM-Ascend has no function for this choice.

    Parameters
    ----------
    vllm_config
        vLLM's ``VllmConfig``.
    redundant
        Number of redundant experts.
    """
    if not redundant:
        return
    try:
        from vllm_ascend.ascend_forward_context import select_moe_comm_method
    except ImportError:
        return
    tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
    method = select_moe_comm_method(tokens, vllm_config)
    refuse(
        [
            (
                method is not None and method.name == "ALLGATHER",
                f"all-gather dispatch with {redundant} redundant experts for steps of up to {tokens} tokens",
                "This dispatch looks up physical experts in a map of logical experts",
                "On A2, use at least 16 ranks with at most 24 experts each, and keep --max-num-batched-tokens within "
                "MC2's capacity: 512 for each tensor-parallel rank with enable_prefill_mc2 in --additional-config, or "
                "the largest captured graph in release 0.18, which ignores enable_prefill_mc2; or set "
                "num_redundant_experts to 0",
            )
        ]
    )


def refuse_misread_lists(w1_scale: Any, w2_scale: Any, mc2: bool, kernel_for_lists: bool) -> None:
    """Refuse scales that vLLM-Ascend would misread or replace.

    With dynamic EPLB, the scales are lists with one tensor per local slot. Without its kernel for such lists,
    vLLM-Ascend uses kernels for single tensors. It then applies the first expert's scales to all experts, or replaces
    them in the list.

    Parameters
    ----------
    w1_scale
        Scales of the first projection: a list of tensors, a single tensor, or ``None``.
    w2_scale
        Scales of the second projection.
    mc2
        True if the layer dispatches with MC2.
    kernel_for_lists
        True if vLLM-Ascend has its kernel for lists and uses it.
    """
    if kernel_for_lists or not isinstance(w1_scale, list) or len(w1_scale) < 2:
        return
    remedy = "Install vLLM-Ascend with its custom operators and leave fusion_ops_gmmswigluquant on"
    refuse(
        [
            (
                mc2,
                "quantised experts under MC2 without vLLM-Ascend's kernel for expert lists",
                "Without that kernel, vLLM-Ascend applies the first expert's scales to all of a rank's experts, so "
                "outputs are wrong",
                remedy,
            ),
            (
                w1_scale[0].dtype != w2_scale[0].dtype,
                "quantised experts whose tensors vLLM-Ascend replaces during serving",
                "Without its kernel for lists, it converts the first expert's scales on first use and stores them in a "
                "new tensor",
                remedy,
            ),
        ]
    )
