"""The transformer around the MoE layers, as Qwen3-MoE has it: embedding, attention, routers, output head.

It is the same on every rank. Parameters have the names of Hugging Face's ``Qwen3MoeForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from worker_agent.model.config import BYTES, EPSILON, ROTARY_BASE, ModelConfig
from worker_agent.moe import Router

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A block's MoE layer: hidden ``[T, H]``, expert ids ``[T, K]`` and weights ``[T, K]`` to ``[T, H]``."""


class Attend(Protocol):
    """How queries meet keys: over a whole text in training, over a cache in serving."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries ``[B, heads, T, width]`` in, and the same shape out; keys and values ``[B, kv_heads, T, width]``.

        Queries and keys are normalised, and rotated by their positions.
        """
        ...


@dataclass(frozen=True)
class Forward:
    """What a forward pass gives: logits ``[B, T, 256]``, and of each block's router logits ``[B*T, E]``."""

    logits_BTV: torch.Tensor
    router_logits_LNE: list[torch.Tensor]


class Attention(nn.Module):
    """Grouped-query attention whose queries and keys are normalised per head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._width = config.head_width
        keys = config.kv_heads * self._width
        self.q_proj = _linear(config.hidden, config.hidden)
        self.k_proj = _linear(config.hidden, keys)
        self.v_proj = _linear(config.hidden, keys)
        self.o_proj = _linear(config.hidden, config.hidden, (2 * config.layers) ** -0.5)
        self.q_norm = nn.RMSNorm(self._width, eps=EPSILON)
        self.k_norm = nn.RMSNorm(self._width, eps=EPSILON)

    def forward(
        self, layer: int, x_BTH: torch.Tensor, rotation: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """What each token takes from those before it, ``[B, T, H]``."""
        q, k, v = (
            projection(x_BTH).unflatten(-1, (-1, self._width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        mixed = attend(layer, rotate(q, rotation), rotate(k, rotation), v.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SparseMLP(nn.Module):
    """The router of a block; its experts are passed in, because on a rank most of them are elsewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.choose = Router(config.experts, config.top_k)
        self.gate = _linear(config.hidden, config.experts)

    def forward(self, x_BTH: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum of each token's experts ``[B, T, H]``, and the router's logits ``[B*T, E]``."""
        tokens_NH = x_BTH.flatten(0, 1)
        logits_NE = self.gate(tokens_NH)
        weights_NK, ids_NK = self.choose(logits_NE)
        return experts(tokens_NH, ids_NK, weights_NK).view_as(x_BTH), logits_NE


class Block(nn.Module):
    """Attention, then experts, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=EPSILON)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=EPSILON)
        self.mlp = SparseMLP(config)

    def forward(
        self, layer: int, x_BTH: torch.Tensor, rotation: torch.Tensor, attend: Attend, experts: Experts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after this block, and the router's logits ``[B*T, E]``.

        Parameters
        ----------
        layer
            The block's index.
        x_BTH
            The residual stream before it.
        rotation
            Rotary embedding of the tokens' positions.
        attend, experts
            How attention and experts are carried out.
        """
        x_BTH = x_BTH + self.self_attn(layer, self.input_layernorm(x_BTH), rotation, attend)
        chosen_BTH, logits_NE = self.mlp(self.post_attention_layernorm(x_BTH), experts)
        return x_BTH + chosen_BTH, logits_NE


class Backbone(nn.Module):
    """All but the output head: the ``model`` of a checkpoint's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(BYTES, config.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=EPSILON)


class ByteTransformer(nn.Module):
    """Bytes to logits of the next byte. Its own parameters are the replicated ones; ``experts`` has one per block."""

    def __init__(self, config: ModelConfig, experts: Sequence[Experts]) -> None:
        super().__init__()
        if len(experts) != config.layers:
            raise ValueError(f"the model has {config.layers} blocks, got {len(experts)} MoE layers")
        self.config = config
        self.model = Backbone(config)
        self.lm_head = _linear(config.hidden, BYTES)
        self._experts = tuple(experts)

    def route_by(self, router: Router) -> None:
        """Choose experts by another router in every block, over the same logits."""
        for block in self.model.layers:
            assert isinstance(block, Block), "the backbone has nothing else"
            block.mlp.choose = router

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.lm_head.weight.dtype

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, attend: Attend) -> Forward:
        """``tokens`` and ``positions`` are int64 ``[B, T]``."""
        rotation = rotary_embedding(positions_BT, self.config.head_width, self.dtype)
        x_BTH = self.model.embed_tokens(tokens_BT)
        router_logits = []
        for layer, (block, experts) in enumerate(zip(self.model.layers, self._experts, strict=True)):
            x_BTH, logits_NE = block(layer, x_BTH, rotation, attend, experts)
            router_logits.append(logits_NE)
        return Forward(self.lm_head(self.model.norm(x_BTH)), router_logits)


def rotary_embedding(positions_BT: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines ``[2, B, 1, T, width / 2]`` of each position."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions_BT.device) / width
    angles = positions_BT.unsqueeze(-1) * ROTARY_BASE**-exponents
    return torch.stack([angles.cos(), angles.sin()]).unsqueeze(2).to(dtype)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys ``[B, heads, T, width]`` by their positions."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attend_to_the_past(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over a whole text."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A matrix that keeps the variance of its input, times ``scale``."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=scale * inputs**-0.5)
    return linear
