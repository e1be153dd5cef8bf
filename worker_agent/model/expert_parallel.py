"""The model on one of R ranks: its own copy of attention and routers, and its part of the experts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from worker_agent.model.transformer import ByteTransformer
from worker_agent.model.weights_file import WeightsFile
from worker_agent.moe import ExpertParallelMoE

SERVING_DTYPE = torch.float64
"""Double precision: another order of the same sums then never tips the choice between two bytes.

A matrix product may round differently with other rows beside a token's own, which is what a placement changes. In
float32 that shifts logits by a millionth, and about one in a million bytes is won by less.
"""


def expert_parallel(
    weights: WeightsFile,
    placement: Placement,
    ep_group: dist.ProcessGroup | None,
    dispatcher: str = "all2allv",
) -> tuple[ByteTransformer, list[ExpertParallelMoE]]:
    """The model of a weights file with its experts placed over the ranks of ``ep_group``, and its MoE layers.

    Raises ``ValueError`` where the placement is not of the model's shape.
    """
    config = weights.config
    if (placement.layers, placement.experts) != (config.layers, config.experts):
        raise ValueError(
            f"the model has {config.layers} layers of {config.experts} experts, "
            f"the placement {placement.layers} of {placement.experts}"
        )
    layers = [
        ExpertParallelMoE(
            config.shape(layer),
            placement.phy2log_LRS[layer],
            weights.experts(layer),
            dispatcher=dispatcher,
            ep_group=ep_group,
            dtype=SERVING_DTYPE,
        )
        for layer in range(config.layers)
    ]
    model = ByteTransformer(config, layers).to(SERVING_DTYPE)
    weights.fill(model)
    return model.eval(), layers
