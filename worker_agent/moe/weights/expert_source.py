"""Where a layer's expert weights come from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker_agent.moe.shape import MoEShape

ExpertSource = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Logical expert id -> (``w13 [2*I, H]``, ``w2 [H, I]``), the same on whichever rank it is called."""


def seeded_experts(shape: MoEShape, seed: int = 0) -> ExpertSource:
    """Random float32 experts that keep the scale of their input, drawn from seed, layer and expert id."""

    def draw(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + shape.layer) * 1_000_003 + expert)
        w13_IH = torch.randn(2 * shape.intermediate, shape.hidden, generator=generator)
        w2_HI = torch.randn(shape.hidden, shape.intermediate, generator=generator)
        return w13_IH * shape.hidden**-0.5, w2_HI * shape.intermediate**-0.5

    return draw
