"""The model on one of R ranks: its own copy of attention and routers, and its part of the experts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from worker_agent.model.checkpoint import Checkpoint
from worker_agent.model.transformer import ByteTransformer
from worker_agent.moe import ExpertParallelMoE, LayerOptions, MicroBatch
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.router import Router, grouped_routing

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
    quantized: bool = False,
    dual_batch: bool = False,
    split: str = "tables",
    dealing_width: int = 1,
    expert_groups: int = 1,
    most_rows: int | None = None,
) -> tuple[ByteTransformer, list[ExpertParallelMoE]]:
    """The model of a checkpoint with its experts placed over the ranks of ``ep_group``, and its MoE layers.

    Parameters
    ----------
    checkpoint
        The model.
    placement
        Of its experts, in every layer.
    ep_group
        The ranks.
    dispatcher
        By which tokens travel.
    quantized
        Whether the experts are W8A8.
    dual_batch
        Whether every step's tokens go through each MoE layer in two micro-batches.
    split, dealing_width
        How tokens are split over replicas (``LayerOptions``), and the entries of dealing tables.
    expert_groups
        Each token chooses equally many experts of every group, as MoGE needs with a group for each rank: the model was
        not trained for it, and writes worse.
    most_rows
        The tokens that no rank has more of in any step; without it the ranks ask each other in every layer and step,
        and wait for the answers, where the dispatcher pads.

    Raises
    ------
    ValueError
        Where the placement is not of the model's shape, or groups do not divide its experts and choices.
    """
    config = checkpoint.config
    if config.experts % expert_groups or config.top_k % expert_groups:
        raise ValueError(
            f"{config.experts} experts and {config.top_k} choices per token do not divide into {expert_groups} groups"
        )
    if (placement.layers, placement.experts) != (config.layers, config.experts):
        raise ValueError(
            f"the model has {config.layers} layers of {config.experts} experts, "
            f"the placement {placement.layers} of {placement.experts}"
        )
    layers = [
        ExpertParallelMoE(
            config.shape(layer),
            placement.phy2log_LRS[layer],
            checkpoint.experts(layer),
            dispatcher=dispatcher,
            ep_group=ep_group,
            dtype=SERVING_DTYPE,
            quantized=quantized,
            options=LayerOptions(split=split),
            dealing_width=dealing_width,
        )
        for layer in range(config.layers)
    ]
    experts = [(InTwoBatches if dual_batch else InOneBatch)(layer, most_rows) for layer in layers]
    model = ByteTransformer(config, experts).to(SERVING_DTYPE)
    if expert_groups > 1:
        model.route_by(Router(config.experts, config.top_k, custom=grouped_routing(expert_groups)))
    checkpoint.fill(model)
    return model.eval(), layers


class InOneBatch:
    """A layer in steps of at most so many tokens on any rank."""

    def __init__(self, layer: ExpertParallelMoE, most_rows: int | None) -> None:
        self._layer = layer
        self._length = most_rows

    def __call__(
        self, hidden_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """All tokens' outputs, ``[T, H]``."""
        return self._layer(hidden_TH, topk_ids_TK, topk_weights_TK, length=self._length)  # type: ignore[no-any-return]


class InTwoBatches:
    """The same, whose tokens come in two halves of a step, which overlap."""

    def __init__(self, layer: ExpertParallelMoE, most_rows: int | None) -> None:
        self._layer = layer
        self._length = None if most_rows is None else (most_rows + 1) // 2

    def __call__(
        self, hidden_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """All tokens' outputs, ``[T, H]``."""
        half = (hidden_TH.shape[0] + 1) // 2
        tensors = (hidden_TH, topk_ids_TK, topk_weights_TK)
        first, second = (
            MicroBatch(*(tensor[part] for tensor in tensors)) for part in (slice(half), slice(half, None))
        )
        return torch.cat(self._layer.forward_two(first, second, length=self._length))
