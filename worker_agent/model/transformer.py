"""The transformer around the MoE layers: embedding, attention, routers, output; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from worker_agent.model.config import BYTES, ModelConfig
from worker_agent.moe import Router

_ROTARY_BASE = 10_000.0
_EPSILON = 1e-6

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A block's MoE layer: hidden ``[T, H]``, expert ids ``[T, K]`` and weights ``[T, K]`` to ``[T, H]``."""


class Attend(Protocol):
    """How queries meet keys: over a whole text in training, over a cache in serving."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``[B, heads, T, width]`` each, keys and queries turned by their positions; the same shape back."""
        ...


@dataclass(frozen=True)
class Forward:
    """What a forward pass gives: logits ``[B, T, 256]``, and of each block's router logits ``[B*T, E]``."""

    logits_BTV: torch.Tensor
    router_logits_LNE: list[torch.Tensor]


class Block(nn.Module):
    """Attention and a router; the experts are passed in, because on a rank most of them are elsewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, spread = config.hidden, config.hidden**-0.5
        self._heads = config.heads
        self._choose = Router(config.experts, config.top_k)
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.randn(3 * hidden, hidden) * spread)
        self.out = nn.Parameter(torch.randn(hidden, hidden) * spread * (2 * config.layers) ** -0.5)
        self.moe_norm = nn.Parameter(torch.ones(hidden))
        self.router = nn.Parameter(torch.randn(config.experts, hidden) * spread)

    def forward(
        self, layer: int, x_BTH: torch.Tensor, turn: torch.Tensor, attend: Attend, experts: Experts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after this block, and the router's logits ``[B*T, E]``."""
        batch, length, hidden = x_BTH.shape
        qkv = functional.linear(normalise(x_BTH, self.attention_norm), self.qkv)
        q, k, v = qkv.view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed = (
            attend(layer, rotate(q, turn), rotate(k, turn), v).transpose(1, 2).reshape(batch, length, hidden)
        )
        x_BTH = x_BTH + functional.linear(mixed, self.out)
        tokens_NH = normalise(x_BTH, self.moe_norm).reshape(-1, hidden)
        logits_NE = functional.linear(tokens_NH, self.router)
        weights_NK, ids_NK = self._choose(logits_NE)
        return x_BTH + experts(tokens_NH, ids_NK, weights_NK).view_as(x_BTH), logits_NE


class ByteTransformer(nn.Module):
    """Bytes to logits of the next byte. Its own parameters are the replicated ones; ``experts`` has one per block."""

    def __init__(self, config: ModelConfig, experts: Sequence[Experts]) -> None:
        super().__init__()
        if len(experts) != config.layers:
            raise ValueError(f"the model has {config.layers} blocks, got {len(experts)} MoE layers")
        self.config = config
        self.embedding = nn.Parameter(torch.randn(BYTES, config.hidden) * 0.5)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden))
        self.head = nn.Parameter(torch.randn(BYTES, config.hidden) * config.hidden**-0.5)
        self._experts = tuple(experts)

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, attend: Attend) -> Forward:
        """``tokens`` and ``positions`` are int64 ``[B, T]``."""
        turn = rotation(positions_BT, self.config.hidden // self.config.heads, self.embedding.dtype)
        x_BTH = functional.embedding(tokens_BT, self.embedding)
        router_logits = []
        for layer, (block, experts) in enumerate(zip(self.blocks, self._experts, strict=True)):
            x_BTH, logits_NE = block(layer, x_BTH, turn, attend, experts)
            router_logits.append(logits_NE)
        return Forward(functional.linear(normalise(x_BTH, self.final_norm), self.head), router_logits)


def normalise(x: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation of the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPSILON) * scale_H


def rotation(positions_BT: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rotary embedding: cosines and sines ``[2, B, 1, T, width / 2]`` of each position."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions_BT.device) / width
    angles = positions_BT.unsqueeze(-1) * _ROTARY_BASE**-exponents
    return torch.stack([angles.cos(), angles.sin()]).unsqueeze(2).to(dtype)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn queries or keys ``[B, heads, T, width]`` by their positions."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attend_to_the_past(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over a whole text."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
