"""What of vLLM-Ascend cannot be balanced, said before a wrong token could be."""

from __future__ import annotations

import os
from typing import Any

from worker_agent.adapters.compat import release_of
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend.known import KNOWN

_REFUSED = {
    "recording": (
        "recording of expert maps (EXPERT_MAP_RECORD)",
        "The host then never installs what it plans",
        "Record with `eplb trace record`",
    ),
    "fused_mc2": (
        "fused MC2",
        "It dispatches inside a kernel, with weights in a layout of its own",
        "Unset enable_fused_mc2 and VLLM_ASCEND_ENABLE_FUSED_MC2",
    ),
    "mix_placement": (
        "mix_placement",
        "Shared experts are then placed among the routed ones",
        "Turn it off",
    ),
    "310p": (
        "Atlas 300I (310P)",
        "It dispatches grouped experts (MoGE), whose replicas must stay in their group",
        "Use A2, A3 or A5",
    ),
    "sleep_mode": (
        "sleep mode",
        "Weights may leave the device, or come back in their first layout, while experts move",
        "Start without --enable-sleep-mode",
    ),
    "stages": (
        "pipeline parallelism in vLLM-Ascend 0.18",
        "It calls its balancer after a forward pass in the last stage alone",
        "Use vLLM-Ascend 0.23, or start without --pipeline-parallel-size",
    ),
    "pooling": (
        "a pooling model",
        "vLLM-Ascend does not call its balancer after a forward pass of one",
        "Serve it without dynamic_eplb",
    ),
}
"""What is refused, why, and what to do instead."""


def refuse_lists_that_the_host_misreads(
    w1_scale: Any, w2_scale: Any, mc2: bool, kernel_for_lists: bool
) -> None:
    """Hold the scales of one layer against what the host is about to do with them.

    Parameters
    ----------
    w1_scale, w2_scale
        Scales of quantised experts, as the host hands them on: lists of a tensor per local slot under dynamic EPLB.
    mc2
        Whether it dispatches by MC2.
    kernel_for_lists
        Whether it runs its own kernel for lists; else it makes do with kernels for single tensors.

    Raises
    ------
    UnsupportedEngineError
        Where the host would use the first expert's scales for all, or put another tensor into its list.
    """
    if kernel_for_lists or not isinstance(w1_scale, list) or len(w1_scale) < 2:
        return
    remedy = "Install vLLM-Ascend with its custom operators and leave fusion_ops_gmmswigluquant on"
    if mc2:
        raise UnsupportedEngineError(
            "quantised experts under MC2 without vLLM-Ascend's kernel for lists of experts",
            "It then takes the first expert's scales for all of a rank's experts, and answers wrongly",
            remedy,
        )
    if w1_scale[0].dtype != w2_scale[0].dtype:
        raise UnsupportedEngineError(
            "quantised experts whose tensors vLLM-Ascend replaces while it serves",
            "Without its kernel for lists it converts the first expert's scales on first use, and puts them into a "
            "new tensor",
            remedy,
        )


def refuse_settings(eplb_config: Any) -> None:
    """Hold the host's configuration against what the agent can balance.

    Parameters
    ----------
    eplb_config
        The host's.

    Raises
    ------
    UnsupportedEngineError
        Where a setting does not go with the agent.
    """
    from vllm.config import get_current_vllm_config
    from vllm_ascend import envs
    from vllm_ascend._version import __version__
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import get_ascend_device_type

    config, vllm_config = get_ascend_config(), get_current_vllm_config()
    stages = vllm_config.parallel_config.pipeline_parallel_size
    fused = getattr(config, "enable_fused_mc2", getattr(envs, "VLLM_ASCEND_ENABLE_FUSED_MC2", 0))
    recording = eplb_config.expert_map_record_path or os.environ.get("EXPERT_MAP_RECORD", "false") == "true"
    found = {
        "recording": bool(recording),
        "fused_mc2": bool(fused),
        "mix_placement": bool(getattr(config, "mix_placement", False)),
        "310p": get_ascend_device_type().name == "_310P",
        "sleep_mode": bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
        "stages": release_of(__version__, KNOWN) == "0.18" and stages > 1,
        "pooling": vllm_config.model_config.runner_type == "pooling",
    }
    for setting, refused in found.items():
        if refused:
            raise UnsupportedEngineError(*_REFUSED[setting])
