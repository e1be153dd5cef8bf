"""Select the tensors that make up a vLLM-Ascend expert, and refuse tensors whose experts cannot be sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import EngineLayer
from worker_agent.adapters.unmoved import refuse_unmoved
from worker_agent.device import BASE_FORMATS, format_of
from worker_agent.live_layer import ExpertWeights

_FLOAT = ("w13_weight", "w2_weight")
_W8A8 = ("w13_weight_list", "w2_weight_list", "w13_weight_scale_fp32_list", "w2_weight_scale_list")
_MX = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
NAMES = {"NONE": _FLOAT, "W8A8": _W8A8} | dict.fromkeys(("MXFP4", "MXFP8", "W4A4MXFP", "W8A8MXFP"), _MX)
"""Names of an expert's weights without fused MC2, by quantisation type, as in vLLM-Ascend's own table.

Release 0.30 calls MXFP4 and MXFP8 ``W4A4MXFP`` and ``W8A8MXFP``.
"""

_NO_EXPERTS = frozenset(
    {
        *("e_score_correction_bias", "tid2eid", "moe_load", "load_counter"),
        *("log2phy", "_expert_map", "expert_map", "global_expert_map", "expert_mask"),
        *("w13_weight_offset", "w2_weight_offset"),
    }
)
"""Router, heat and table tensors, and the offsets of symmetric quantisation, which are zeros."""


def expert_weights(layer: Any, quantised: bool, *, move_quantised: bool = False) -> list[ExpertWeights]:
    """Return the weights that vLLM-Ascend's kernels read, by kind. Index ``s`` of each kind is local slot ``s``.

    Parameters
    ----------
    layer
        Layer whose weights have been loaded and processed.
    quantised
        True if the model has a quantisation config. If it has none, the layer's quantisation type is ignored.
    move_quantised
        True to accept quantised experts, whose tensors are in NPU-specific formats. Moving them has never been tested
        on a device, so they require verified transfers.

    Raises
    ------
    UnsupportedEngineError
        If experts with this quantisation cannot be moved, if one of an expert's tensors would stay
        behind, or if a tensor's NPU format does not allow its experts to be sent one by one.
    """
    kind = layer.quant_type.name if quantised else "NONE"
    if kind not in NAMES:
        raise UnsupportedEngineError(
            f"MoE layers with {kind} quantisation",
            f"Only experts with quantisation {', '.join(sorted(NAMES))} can be moved",
            "Choose another quantisation",
        )
    if kind != "NONE" and not move_quantised:
        raise UnsupportedEngineError(
            f"experts quantised as {kind}",
            "No test on a device has shown that they arrive intact in the NPU's own formats",
            "Set EPLB_AGENT_QUANTISED_EXPERTS=true to move them with verified transfers, and compare outputs",
        )
    names = NAMES[kind]
    if missing := [name for name in names if getattr(layer, name, None) is None]:
        raise UnsupportedEngineError(
            f"MoE layers (quantisation {kind}) without {', '.join(missing)}",
            "An expert's weights would be incomplete",
            "Report this model",
        )
    weights = [getattr(layer, name) for name in names]
    refuse_unmoved(layer, weights, int(layer.local_num_experts), _NO_EXPERTS)
    for name, weight in zip(names, weights, strict=True):
        _refuse_formats(name, weight)
    # Return vLLM-Ascend's own lists, so that ``AscendLayer`` notices if vLLM-Ascend replaces a tensor in them.
    return [weight.data if isinstance(weight, torch.Tensor) else weight for weight in weights]


def check_same_formats(weights: Sequence[Sequence[ExpertWeights]], group: dist.ProcessGroup | None) -> None:
    """Refuse, on all ranks, weights whose NPU formats differ between ranks (collective over ``group``).

    Parameters
    ----------
    weights
        Weights of each layer, by kind.
    group
        Process group of the ranks.
    """
    local = [[_comparable(format_of(kind[0])) for kind in layer_weights] for layer_weights in weights]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    differing = [rank for rank, remote in enumerate(gathered) if remote != gathered[0]]
    if differing:
        raise UnsupportedEngineError(
            f"rank {differing[0]}, whose experts' NPU formats differ from those of rank 0",
            "A rank would read the bytes of another rank's expert in the wrong format",
            "Start all ranks with the same weight_nz_mode",
        )


def _comparable(npu_format: int) -> int:
    """Return the format number, or one common number for all formats that store elements in order."""
    return 2 if npu_format in BASE_FORMATS else npu_format


def _refuse_formats(name: str, weight: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Refuse a blocked (NZ) tensor that contains all experts, and lists with several formats.

    torch_npu can only send a blocked tensor as a whole, including its padding.
    """
    if isinstance(weight, torch.Tensor):
        npu_format = format_of(weight)
        if npu_format not in BASE_FORMATS:
            raise UnsupportedEngineError(
                f"a {name} tensor that holds all experts in NPU format {npu_format} (29 is NZ)",
                "In this format, the experts are not separate blocks of memory that can be sent and written one by one",
                "Set weight_nz_mode to 0 or 1",
            )
        return
    formats = sorted({format_of(tensor) for tensor in weight})
    if len(formats) > 1:
        raise UnsupportedEngineError(
            f"{name} with experts in NPU formats {' and '.join(map(str, formats))} (29 is NZ)",
            "An expert that moves to another slot would be read in the wrong format",
            "Report this model",
        )


class AscendLayer(EngineLayer):
    """A vLLM-Ascend layer. While serving, vLLM-Ascend may replace tensors in the layer's lists.

    It has the parameters of ``EngineLayer``.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._initial_lists = [list(kind) for kind in self._weights if isinstance(kind, list)]

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Return the weights.

        Raises ``UnsupportedEngineError`` if vLLM-Ascend has replaced tensors in its lists, because its kernels read the
        replacements.
        """
        lists = [kind for kind in self._weights if isinstance(kind, list)]
        for tensors, initial in zip(lists, self._initial_lists, strict=True):
            if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in initial]:
                raise UnsupportedEngineError(
                    "a quantised expert whose tensors vLLM-Ascend replaces during serving",
                    "Without its custom operators, it replaces the loaded scales on first use with converted ones",
                    "Install vLLM-Ascend with its custom operators, or serve without dynamic_eplb",
                )
        return self._weights
