"""Model from a transformers checkpoint on one of R ranks, with its MoE blocks replaced by expert-parallel ones."""

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
    """Expert-parallel MoE block that replaces the transformers block in a decoder layer.

    Parameters
    ----------
    gate
        Router weights of the original block.
    block
        Expert-parallel block.
    length
        Upper bound on the tokens per rank and step; ``None`` if it is unknown.
    """

    def __init__(self, gate: nn.Module, block: MoEBlock, length: int | None) -> None:
        super().__init__()
        self._gate = gate
        self._block = block
        self._length = length

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
    """Create this rank's model from a Qwen3-MoE or DeepSeek-V2 checkpoint, and return it with its MoE layers.

    Raises ``ValueError`` if the model is not supported or the checkpoint lacks tensors.

    Parameters
    ----------
    folder
        Directory with ``config.json`` and safetensors files. The rank keeps only the experts in its slots.
    placement
        Placement of the experts in all MoE layers.
    ep_group
        Expert-parallel ranks.
    dispatcher
        Token dispatcher, as for ``ExpertParallelMoE``.
    quantization
        Quantisation of the experts.
    split
        Method of splitting an expert's tokens over its replicas, as in ``LayerOptions``.
    dealing_width
        Number of replicas per expert and source rank in the dealing table.
    most_rows
        Upper bound on the tokens per rank and step; ``None`` if it is unknown.
    tensor_parallel
        Number of consecutive ranks that have the same tokens. Each computes a shard of the shared experts.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _check(config, folder)
    model, blocks = _without_experts(config)
    _load_replicated(model, config, folder)

    dp_group, tp_group = RankGroup.of(ep_group).grid(tensor_parallel)
    layers = []
    loaders = {}
    for number, (index, block) in enumerate(blocks.items()):
        shape = MoEShape(number, config.num_experts, config.hidden_size, config.moe_intermediate_size)
        layer = ExpertParallelMoE(
            shape,
            placement.phy2log_LRS[number],
            None,
            dispatcher=dispatcher,
            ep_group=ep_group,
            dtype=SERVING_DTYPE,
            quantization=quantization,
            shared_experts=_shared(number, getattr(block, "shared_experts", None), quantization, tp_group),
            options=LayerOptions(split=split, tp_group=tp_group, dp_groups=[dp_group]),
            dealing_width=dealing_width,
        )
        experts_S = placement.phy2log_LRS[number, layer.ep_rank].tolist()
        prefix = f"model.layers.{index}.mlp.experts"
        loaders[prefix] = ExpertLoader(layer, config.num_experts, experts_S, prefix)
        model.model.layers[index].mlp = _ServedBlock(block.gate, MoEBlock(_router(config), layer), most_rows)
        layers.append(layer)
    _load_experts(folder, layers, loaders)
    return model, layers


def _without_experts(config: Any) -> tuple[Any, dict[int, Any]]:
    """Return a model with uninitialised weights and no experts, and its MoE blocks by layer index."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=SERVING_DTYPE).eval()
    blocks = {
        index: layer.mlp for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")
    }
    for block in blocks.values():
        del block.experts
    model.to_empty(device="cpu")
    # ``to_empty`` leaves the rotary frequencies uninitialised, and the checkpoint does not contain them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model, blocks


def _load_replicated(model: Any, config: Any, folder: Path) -> None:
    """Load every tensor except the experts. Raises ``ValueError`` if tensors are missing or unexpected."""
    replicated = {name: tensor for name, tensor in _tensors(folder) if not _EXPERT.match(name)}
    mismatch = model.load_state_dict(replicated, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(set(mismatch.missing_keys) - tied):
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, such as {missing[0]}")
    if mismatch.unexpected_keys:
        raise ValueError(f"{folder}: the model has no tensor {mismatch.unexpected_keys[0]}")
    model.tie_weights()


def _load_experts(folder: Path, layers: list[ExpertParallelMoE], loaders: dict[str, ExpertLoader]) -> None:
    """Load the experts in this rank's slots; ``loaders`` maps each layer's tensor prefix to its loader."""
    for name, tensor in _tensors(folder):
        if (expert := _EXPERT.match(name)) and expert[1] in loaders:
            loaders[expert[1]].load(name, tensor)
    for layer, loader in zip(layers, loaders.values(), strict=True):
        loader.finish()
        layer.process_after_load()


def _check(config: Any, folder: Path) -> None:
    """Raise ``ValueError`` if this module cannot serve the model."""
    quantized = getattr(config, "quantization_config", None)
    method = getattr(config, "topk_method", None)
    problems = {
        f"has model_type {config.model_type}; use qwen3_moe or deepseek_v2": config.model_type
        not in ("qwen3_moe", "deepseek_v2"),
        f"is quantised ({quantized}), which is not supported; use an unquantised checkpoint": quantized
        is not None,
        f"uses the activation {config.hidden_act}; only silu is supported": config.hidden_act != "silu",
        f"has topk_method {method}; use greedy or group_limited_greedy": config.model_type == "deepseek_v2"
        and method not in ("greedy", "group_limited_greedy"),
    }
    for problem, applies in problems.items():
        if applies:
            raise ValueError(f"{folder}: the model {problem}")


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each tensor, in ``SERVING_DTYPE``. Raises ``ValueError`` if one is quantised."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or tensor.itemsize == 1:
                    raise ValueError(
                        f"{path}: {name} has dtype {tensor.dtype}, which is not supported; use an unquantised model"
                    )
                yield name, tensor.to(SERVING_DTYPE)


def _shared(number: int, module: Any, quantization: str, tp_group: RankGroup) -> SharedExperts | None:
    """Return this tensor-parallel rank's shard of a block's shared experts, or ``None`` if the block has none.

    ``SharedExperts`` checks its outputs against ``module``, transformers' own implementation.
    """
    if module is None:
        return None
    gate_IH, up_IH, down_HI = (
        projection.weight.detach().tensor_split(tp_group.size, dim=dim)[tp_group.rank]
        for projection, dim in ((module.gate_proj, 0), (module.up_proj, 0), (module.down_proj, 1))
    )
    weights = ExpertWeights(torch.cat([gate_IH, up_IH]).unsqueeze(0), down_HI.contiguous().unsqueeze(0))
    return SharedExperts(
        number,
        weights,
        operators_for(down_HI.device),
        SERVING_DTYPE,
        tp=tp_group,
        whole=module,
        quantization=quantization,
    )


def _router(config: Any) -> Router:
    """Return the router that the model's config describes."""
    experts = config.num_experts
    top_k = config.num_experts_per_tok
    if config.model_type == "qwen3_moe":
        return Router(experts, top_k, renormalise=config.norm_topk_prob)
    has_groups = config.topk_method == "group_limited_greedy"
    return Router(
        experts,
        top_k,
        renormalise=False,
        groups=config.n_group if has_groups else 1,
        top_groups=config.topk_group if has_groups else 1,
        scaling_factor=config.routed_scaling_factor,
    )
