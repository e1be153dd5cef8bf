"""The tensors that make up an expert of vLLM-Ascend, and the refusal of those of which none can be sent."""

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

_PLAIN = ("w13_weight", "w2_weight")
_W8A8 = ("w13_weight_list", "w2_weight_list", "w13_weight_scale_fp32_list", "w2_weight_scale_list")
_MX = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
NAMES = {"NONE": _PLAIN, "W8A8": _W8A8, "MXFP4": _MX, "MXFP8": _MX}
"""By the host's quantisation type, without fused MC2: its table of expert weight names in 0.23."""
_NAMES_018 = {"NONE": _PLAIN, "W8A8": _W8A8}

_NOT_OF_AN_EXPERT = frozenset(
    {
        *("e_score_correction_bias", "tid2eid", "moe_load", "load_counter"),
        *("log2phy", "_expert_map", "expert_map", "global_expert_map", "expert_mask"),
        *("w13_weight_offset", "w2_weight_offset"),
    }
)
"""The router's, heat, tables, and offsets of symmetric quantisation, which are zeros."""


def expert_weights(
    layer: Any, quantised: bool, *, release: str = "0.23", move_quantised: bool = False
) -> list[ExpertWeights]:
    """Return the weights that the host's kernels read, by kind; of each, local slot ``s`` is at index ``s``.

    ``layer`` is an ``AscendFusedMoE`` whose weights have been processed after loading; without a quantisation config of
    the model its type does not count. ``move_quantised`` allows quantised experts, whose tensors are in formats of
    the NPU. Until such moves have been tested on a device, they require verified transfers.

    Raises ``UnsupportedEngineError`` for a quantisation whose experts the host itself cannot move, tensors per expert
    that nobody would move, and tensors in formats of the NPU of which no single expert can be sent.
    """
    kind = layer.quant_type.name if quantised else "NONE"
    known = _NAMES_018 if release == "0.18" else NAMES
    if kind not in known:
        raise UnsupportedEngineError(
            f"quantisation {kind} of MoE layers",
            f"vLLM-Ascend {release} moves experts of {', '.join(sorted(known))} alone",
            "Choose another quantisation",
        )
    if kind != "NONE" and not move_quantised:
        raise UnsupportedEngineError(
            f"experts quantised as {kind}",
            "That they arrive whole in the NPU's own formats has not been shown on a device",
            "Set EPLB_AGENT_QUANTISED_EXPERTS=true to move them with verified transfers, and compare outputs",
        )
    names = known[kind]
    if missing := [name for name in names if getattr(layer, name, None) is None]:
        raise UnsupportedEngineError(
            f"MoE layers of {kind} without {', '.join(missing)}",
            "The weights of an expert would not be complete",
            "Report this model",
        )
    found = [getattr(layer, name) for name in names]
    refuse_unmoved(layer, found, int(layer.local_num_experts), _NOT_OF_AN_EXPERT)
    for name, weight in zip(names, found, strict=True):
        _refuse_formats(name, weight)
    # The host's own lists, not copies: it puts other tensors into them where it converts scales.
    return [weight.data if isinstance(weight, torch.Tensor) else weight for weight in found]


def check_same_formats(weights: Sequence[Sequence[ExpertWeights]], group: dist.ProcessGroup | None) -> None:
    """Compare the formats of all layers' weights with other ranks', and refuse others on all alike; a collective."""
    own = [[_comparable(format_of(kind[0])) for kind in of_layer] for of_layer in weights]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise UnsupportedEngineError(
            f"rank {others[0]} keeps its experts in other formats of the NPU than rank 0",
            "The bytes of one would be read as if they were in the other's",
            "Start all ranks with the same weight_nz_mode",
        )


def _comparable(found: int) -> int:
    return 2 if found in BASE_FORMATS else found


def _refuse_formats(name: str, weight: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Refuse tensors in blocks (NZ): torch_npu sends one whole, padding included, and no part of it."""
    if isinstance(weight, torch.Tensor):
        found = format_of(weight)
        if found not in BASE_FORMATS:
            raise UnsupportedEngineError(
                f"{name} of all experts as one tensor in the NPU's format {found} (29 is NZ)",
                "An expert of it is no piece of memory that can be sent, or written to in place",
                "Set weight_nz_mode (VLLM_ASCEND_ENABLE_NZ) to 0 or 1",
            )
        return
    formats = sorted({format_of(tensor) for tensor in weight})
    if len(formats) > 1:
        raise UnsupportedEngineError(
            f"{name} with experts in the NPU's formats {' and '.join(map(str, formats))} (29 is NZ)",
            "The bytes of one would be read as if they were in the other's",
            "Report this model",
        )


class AscendLayer(EngineLayer):
    """A layer whose host may replace tensors in its lists while it serves; arguments are ``EngineLayer``'s."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first = [list(kind) for kind in self._weights if isinstance(kind, list)]

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Return the tensors, and refuse lists into which the host has put others: its kernels read those."""
        lists = [kind for kind in self._weights if isinstance(kind, list)]
        for held, first in zip(lists, self._first, strict=True):
            if [id(tensor) for tensor in held] != [id(tensor) for tensor in first]:
                raise UnsupportedEngineError(
                    "a quantised expert whose tensors vLLM-Ascend replaces while it serves",
                    "Without its custom operators it converts scales on first use, in place of the ones that it loaded",
                    "Install vLLM-Ascend with its custom operators, or serve without dynamic_eplb",
                )
        return self._weights
