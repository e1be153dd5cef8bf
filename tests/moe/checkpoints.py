"""Checkpoints of a small layer, and loaders of their tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from worker_agent.moe.checkpoint import CheckpointNames, ExpertLoader
from worker_agent.moe.expert_parameter import ExpertParameter, Shard

NAMES = CheckpointNames("model.layers.3.mlp.experts")
E, H, I = 4, 6, 8  # noqa: E741


def checkpoint(
    suffix: str, w1: tuple[int, ...], w2: tuple[int, ...]
) -> Iterator[tuple[int, Shard, str, torch.Tensor]]:
    """Random tensors of all experts."""
    generator = torch.Generator().manual_seed(0)
    for expert in range(E):
        for shard in Shard:
            shape = w2 if shard is Shard.W2 else w1
            yield expert, shard, NAMES.tensor(expert, shard, suffix), torch.randn(shape, generator=generator)


def loader(
    logical_S: list[int], suffix: str, w13: ExpertParameter, w2: ExpertParameter, **tp: int
) -> ExpertLoader:
    return ExpertLoader(3, E, logical_S, NAMES, {suffix: (w13, w2)}, **tp)


def weights(slots: int = 2, tp_size: int = 1) -> tuple[ExpertParameter, ExpertParameter]:
    width = I // tp_size
    return ExpertParameter(torch.zeros(slots, 2 * width, H)), ExpertParameter(torch.zeros(slots, H, width))
