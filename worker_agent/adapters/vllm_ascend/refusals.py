"""Refuse vLLM-Ascend settings and quantised weights that would give wrong outputs or cannot be balanced."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from worker_agent.adapters.compat import read_known, refuse, refuse_split_models, release_of
from worker_agent.adapters.engine_host import warn_of_ignored_settings

KNOWN = read_known("worker_agent.adapters.vllm_ascend")
"""Functions that the adapter patches or relies on, by release."""


_W8A8_SCALES = ("w13_weight_scale_fp32_list", "w2_weight_scale_list")


def release() -> str:
    """Return the release of the installed vLLM-Ascend."""
    from vllm_ascend._version import __version__

    return release_of(__version__, KNOWN)


def refuse_second_runner() -> None:
    """Refuse the second model runner of release 0.30. In release 0.23, that runner has no dynamic EPLB."""
    from vllm import envs

    refuse(
        [
            (
                bool(envs.VLLM_USE_V2_MODEL_RUNNER) and release() != "0.23",
                "the second model runner (VLLM_USE_V2_MODEL_RUNNER)",
                "It has an EPLB of its own, which the agent cannot replace",
                "Unset VLLM_USE_V2_MODEL_RUNNER, or set EPLB_AGENT_MODE=policy",
            )
        ]
    )


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
        warn_of_ignored_settings("vLLM-Ascend", *_settings_and_defaults(eplb_config))


def _settings_and_defaults(eplb_config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values and the defaults of the settings of vLLM-Ascend's balancer, by name."""
    if not dataclasses.is_dataclass(eplb_config):  # release 0.23
        return eplb_config.config, eplb_config._defaults
    fields = dataclasses.fields(eplb_config)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return vars(eplb_config), defaults


def _refuse_ascend_settings(eplb_config: Any) -> None:
    """Refuse unsupported vLLM-Ascend settings and NPU models."""
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
                bool(config.enable_fused_mc2),
                "fused MC2",
                "It dispatches inside a kernel that needs the weights in a special layout",
                "Unset enable_fused_mc2 and VLLM_ASCEND_ENABLE_FUSED_MC2",
            ),
            (
                bool(config.mix_placement),
                "mix_placement",
                "It places shared experts among the routed ones",
                "Turn mix_placement off",
            ),
            (
                bool(config.xlite_graph_config.enabled),
                "xlite graphs (xlite_graph_config)",
                "Xlite runs the experts outside vLLM-Ascend's layers and ignores their tables",
                "Turn xlite_graph_config off",
            ),
            (
                bool(eplb_config.expert_map_path) and release() != "0.23",
                f"expert_map_path in release {release()}",
                "The layers route according to this file, but vLLM loads the experts into the default placement, so "
                "outputs are wrong even without the agent",
                "Unset expert_map_path",
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
                bool(vllm_config.model_config.enable_sleep_mode),
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

    The check runs before the model is loaded, because vLLM-Ascend itself would fail only in its profile run.

    Parameters
    ----------
    vllm_config
        vLLM's ``VllmConfig``.
    redundant
        Number of redundant experts.
    """
    if not redundant:
        return
    from vllm_ascend.ascend_forward_context import select_moe_comm_method

    tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
    method = select_moe_comm_method(tokens, vllm_config)
    refuse(
        [
            (
                method is not None and method.name == "ALLGATHER",
                f"all-gather dispatch with {redundant} redundant experts for steps of up to {tokens} tokens",
                "This dispatch looks up physical experts in a map of logical experts",
                "On A2, use at least 16 ranks with at most 24 experts each, and keep --max-num-batched-tokens within "
                "MC2's capacity: 512 for each tensor-parallel rank with enable_prefill_mc2 in --additional-config; or "
                "set num_redundant_experts to 0",
            )
        ]
    )


def refuse_lists(comm: Any, given: Any, quant_method: Any = None) -> None:
    """Refuse the scales of a layer that is about to run if vLLM-Ascend would misread or replace them.

    Parameters
    ----------
    comm
        vLLM-Ascend's communication method.
    given
        Input of its ``fused_experts``.
    quant_method
        The layer's quantisation method. Release 0.23 passes none.
    """
    from vllm_ascend.ops.fused_moe import moe_comm_method, moe_mlp

    mc2 = isinstance(comm, moe_comm_method.MC2CommImpl)
    if quant_method is None:
        kernel = moe_mlp._custom_gmm_swiglu_enabled(comm.use_fusion_ops, dynamic_eplb=True)
        weights = given.weights
        refuse_misread_lists(weights.w1_scale, weights.w2_scale, first_only=mc2, kernel_for_lists=kernel)
        return
    from vllm_ascend.ops.fused_moe import moe_utils

    fuses = moe_utils.enable_fusion_gmmswigluquant()
    activation = getattr(given.activation, "value", given.activation)
    # For other activations, and without fusion outside MC2, vLLM-Ascend reads all scales and replaces none.
    fused_activation = quant_method.supports_fused_activation(activation)
    if fused_activation and activation != "swigluoai_uninterleave" and (fuses or mc2):
        kernel = moe_utils._custom_gmm_swiglu_enabled(fuses, True, activation)
        w1_scale, w2_scale = (getattr(given.layer, name, None) for name in _W8A8_SCALES)
        refuse_misread_lists(w1_scale, w2_scale, first_only=True, kernel_for_lists=kernel)


def refuse_misread_lists(w1_scale: Any, w2_scale: Any, first_only: bool, kernel_for_lists: bool) -> None:
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
    first_only
        True if vLLM-Ascend's kernels for single tensors would read only the first expert's scales. This depends on the
        dispatch and on the release.
    kernel_for_lists
        True if vLLM-Ascend has its kernel for lists and uses it.
    """
    if kernel_for_lists or not isinstance(w1_scale, list) or len(w1_scale) < 2:
        return
    remedy = "Install vLLM-Ascend with its custom operators and leave fusion_ops_gmmswigluquant on"
    refuse(
        [
            (
                first_only,
                "quantised experts without vLLM-Ascend's kernel for expert lists",
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
