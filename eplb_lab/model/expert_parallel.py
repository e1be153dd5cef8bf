"""The model on one of R ranks: its own copy of attention and routers, and its part of the experts."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from eplb_lab.layer import ExpertParallelMoE, LayerOptions, MicroBatch
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.router import Router, grouped_routing
from eplb_lab.model.checkpoint import Checkpoint
from eplb_lab.model.transformer import ByteTransformer

SERVING_DTYPE = torch.float64
"""Double precision: another order of the same sums then never tips the choice between two bytes.

A matrix product may round differently with other rows beside a token's own, which is what a placement changes. In
float32 that shifts logits by a millionth, and about one in a million bytes is won by less.
"""


def expert_parallel(
    checkpoint: Checkpoint,
    placement: Placement,
    ep_group: dist.ProcessGroup | RankGroup | None,
    dispatcher: str = "all2allv",
    *,
    quantization: str = "none",
    dual_batch: bool = False,
    split: str = "tables",
    dealing_width: int = 1,
    expert_groups: int = 1,
    most_rows: int | None = None,
    tensor_parallel: int = 1,
) -> tuple[ByteTransformer, list[ExpertParallelMoE]]:
    """Make the model of a checkpoint with its experts placed over the ranks of ``ep_group``, and its MoE layers.

    Tokens travel by ``dispatcher`` among the ranks of ``ep_group``. ``quantization`` is the experts'; with
    ``dual_batch`` every step's tokens go through each MoE layer in two micro-batches. ``split`` (``LayerOptions``) and
    ``dealing_width`` say how tokens are split over replicas. Of ``expert_groups`` each token chooses equally many
    experts of every one, as MoGE needs with a group for each rank: the model was not trained for it, and writes worse.
    No rank has more tokens than ``most_rows`` in any step; without it the ranks ask each other in every layer and step,
    and wait for the answers, where the dispatcher pads. Groups of ``tensor_parallel`` ranks have the same tokens.

    The ``placement`` is of all of the ``checkpoint``'s layers. Raises ``ValueError`` where groups do not divide its
    experts and choices.
    """
    config = checkpoint.config
    if config.experts % expert_groups or config.top_k % expert_groups:
        raise ValueError(
            f"{config.experts} experts and {config.top_k} choices per token do not divide into {expert_groups} groups"
        )
    dp, tp = RankGroup.of(ep_group).grid(tensor_parallel)
    layers = [
        ExpertParallelMoE(
            config.shape(layer),
            placement.phy2log_LRS[layer],
            checkpoint.experts(layer),
            dispatcher=dispatcher,
            ep_group=ep_group,
            dtype=SERVING_DTYPE,
            quantization=quantization,
            options=LayerOptions(split=split, tp_group=tp, dp_groups=[dp]),
            dealing_width=dealing_width,
        )
        for layer in range(config.layers)
    ]
    experts = [
        partial(_in_two_batches if dual_batch else _in_one_batch, layer, most_rows) for layer in layers
    ]
    model = ByteTransformer(config, experts).to(SERVING_DTYPE)
    if expert_groups > 1:
        model.route_by(Router(config.experts, config.top_k, custom=grouped_routing(expert_groups)))
    checkpoint.fill(model)
    return model.eval(), layers


def _in_one_batch(layer: ExpertParallelMoE, most_rows: int | None, *tokens: torch.Tensor) -> torch.Tensor:
    out_TH: torch.Tensor = layer(*tokens, length=most_rows)
    return out_TH


def _in_two_batches(layer: ExpertParallelMoE, most_rows: int | None, *tokens: torch.Tensor) -> torch.Tensor:
    """Run a step in two halves, which overlap."""
    half = (tokens[0].shape[0] + 1) // 2
    first, second = (
        MicroBatch(*(tensor[part] for tensor in tokens)) for part in (slice(half), slice(half, None))
    )
    length = None if most_rows is None else (most_rows + 1) // 2
    return torch.cat(layer.forward_two(first, second, length=length))
