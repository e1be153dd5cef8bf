"""A checkpoint of transformers on one of R ranks: its own model, but that the MoE blocks are expert-parallel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.nn.functional import linear

from eplb_core.placement import Placement
from eplb_lab.layer import (
    ExpertLoader,
    ExpertParallelMoE,
    LayerOptions,
    MoEBlock,
    MoEShape,
    Router,
    SharedExperts,
)
from eplb_lab.layer.operators import operators_for
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.weights import ExpertWeights
from eplb_lab.model.expert_parallel import SERVING_DTYPE

_EXPERT = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts)\.")


class _ServedBlock(nn.Module):
    """A decoder layer's MoE block, in the place of transformers' own; no step has more tokens than ``length``."""

    def __init__(self, gate: nn.Module, block: MoEBlock, length: int | None) -> None:
        super().__init__()
        self._gate, self._block, self._length = gate, block, length

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        weight_EH: torch.Tensor = self._gate.weight  # type: ignore[assignment]
        logits_BTE = linear(x_BTH.to(weight_EH.dtype), weight_EH)
        out_BTH: torch.Tensor = self._block(x_BTH, logits_BTE, length=self._length)
        return out_BTH


def serve_checkpoint(
    folder: Path,
    placement: Placement,
    ep_group: dist.ProcessGroup | RankGroup | None,
    dispatcher: str = "all2allv",
    *,
    quantization: str = "none",
    split: str = "tables",
    dealing_width: int = 1,
    most_rows: int | None = None,
    tensor_parallel: int = 1,
) -> tuple[Any, list[ExpertParallelMoE]]:
    """Make transformers' model of a Qwen3-MoE or DeepSeek-V2 checkpoint, its experts placed over ranks, and its layers.

    The ``folder`` has ``config.json`` and safetensors, of which each rank keeps what the ``placement`` gives it.
    ``dispatcher``, ``ep_group``, ``quantization``, ``split`` and ``dealing_width`` are the layers'; no rank has more
    tokens than ``most_rows`` in any step. Groups of ``tensor_parallel`` ranks have the same tokens, and each a part of
    the shared experts. Raises ``ValueError`` where the model is another one, or tensors are missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _check(config, folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=SERVING_DTYPE).eval()
    blocks = {at: layer.mlp for at, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    for block in blocks.values():
        del block.experts
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    replicated = {name: tensor for name, tensor in _tensors(folder) if not _EXPERT.match(name)}
    found = model.load_state_dict(replicated, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(set(found.missing_keys) - tied):
        raise ValueError(f"{folder}: tensors are missing: {missing[0]} and {len(missing) - 1} more")
    if found.unexpected_keys:
        raise ValueError(f"{folder}: the model has no tensor {found.unexpected_keys[0]}")
    model.tie_weights()

    dp, tp = RankGroup.of(ep_group).grid(tensor_parallel)
    layers, loaders = [], {}
    for number, (at, block) in enumerate(blocks.items()):
        shape = MoEShape(number, config.num_experts, config.hidden_size, config.moe_intermediate_size)
        layer = ExpertParallelMoE(
            shape,
            placement.phy2log_LRS[number],
            None,
            dispatcher=dispatcher,
            ep_group=ep_group,
            dtype=SERVING_DTYPE,
            quantization=quantization,
            shared_experts=_shared(number, getattr(block, "shared_experts", None), quantization, tp),
            options=LayerOptions(split=split, tp_group=tp, dp_groups=[dp]),
            dealing_width=dealing_width,
        )
        own_S = placement.phy2log_LRS[number, layer.ep_rank].tolist()
        prefix = f"model.layers.{at}.mlp.experts"
        loaders[prefix] = ExpertLoader(layer, config.num_experts, own_S, prefix)
        model.model.layers[at].mlp = _ServedBlock(block.gate, MoEBlock(_router(config), layer), most_rows)
        layers.append(layer)
    for name, tensor in _tensors(folder):
        if (expert := _EXPERT.match(name)) and expert[1] in loaders:
            loaders[expert[1]].load(name, tensor)
    for layer, loader in zip(layers, loaders.values(), strict=True):
        loader.finish()
        layer.process_after_load()
    return model, layers


def _check(config: Any, folder: Path) -> None:
    """Raise ``ValueError`` unless the blocks here are the model's."""
    quantized, by = (getattr(config, name, None) for name in ("quantization_config", "topk_method"))
    problems = {
        f"is a {config.model_type}; use qwen3_moe or deepseek_v2": config.model_type
        not in ("qwen3_moe", "deepseek_v2"),
        f"is quantized, which nothing here loads: {quantized}": quantized is not None,
        f"has the activation {config.hidden_act}; use silu": config.hidden_act != "silu",
        f"chooses experts by {by}; use greedy or group_limited_greedy": config.model_type == "deepseek_v2"
        and by not in ("greedy", "group_limited_greedy"),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"{folder}: the model {problem}")


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or tensor.itemsize == 1:
                    raise ValueError(
                        f"{path}: {name} has the dtype {tensor.dtype}, which nothing here computes with"
                    )
                yield name, tensor.to(SERVING_DTYPE)


def _shared(number: int, module: Any, quantization: str, tp: RankGroup) -> SharedExperts | None:
    """A block's shared experts in two parts, of which this rank has its columns, held against transformers' own."""
    if module is None:
        return None
    gate_IH, up_IH, down_HI = (
        part.weight.detach().tensor_split(tp.size, dim=dim)[tp.rank]
        for part, dim in ((module.gate_proj, 0), (module.up_proj, 0), (module.down_proj, 1))
    )
    weights = ExpertWeights(torch.cat([gate_IH, up_IH]).unsqueeze(0), down_HI.contiguous().unsqueeze(0))
    arguments = number, weights, operators_for(down_HI.device), SERVING_DTYPE
    return SharedExperts(*arguments, tp=tp, whole=module, quantization=quantization)


def _router(config: Any) -> Router:
    experts, top_k = config.num_experts, config.num_experts_per_tok
    if config.model_type == "qwen3_moe":
        return Router(experts, top_k, renormalise=config.norm_topk_prob)
    grouped = config.topk_method == "group_limited_greedy"
    groups, best = (config.n_group, config.topk_group) if grouped else (1, 1)
    scaling = config.routed_scaling_factor
    return Router(experts, top_k, renormalise=False, groups=groups, top_groups=best, scaling_factor=scaling)
