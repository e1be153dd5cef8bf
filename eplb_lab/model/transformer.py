"""Byte-level Mixture-of-Experts transformer with the Qwen3-MoE architecture, but without its experts.

Embedding, attention, routers and output head are replicated on every rank. Parameters have the same names as in Hugging
Face's ``Qwen3MoeForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from eplb_lab.layer import MoEShape, Router

BYTES = 256
"""Size of the vocabulary. Each token is a byte."""

_ROTARY_BASE = 10_000.0
_EPSILON = 1e-6

_ARCHITECTURE: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": BYTES,
    "hidden_act": "silu",
    "rms_norm_eps": _EPSILON,
    "rope_theta": _ROTARY_BASE,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Fields of ``config.json`` that are the same for all of this module's models."""

_HUGGING_FACE_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "intermediate": "moe_intermediate_size",
    "context": "max_position_embeddings",
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model with the Qwen3-MoE architecture. The defaults are the sizes of the embedded model.

    Parameters
    ----------
    layers
        L, the number of blocks.
    hidden
        H, the size of the residual stream.
    heads
        Number of query heads, each ``hidden / heads`` wide.
    kv_heads
        Number of key and value heads. Each is shared by ``heads / kv_heads`` query heads.
    experts
        E, the number of experts per block. With one expert and a ``top_k`` of 1, the model is dense.
    top_k
        K, the number of choices per token.
    intermediate
        I, the intermediate size of an expert.
    context
        Maximum number of tokens per request.

    Examples
    --------
    >>> config = ModelConfig(hidden=64, heads=4)
    >>> config.head_width
    16
    >>> ModelConfig.from_hugging_face(config.to_hugging_face()) == config
    True
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    experts: int = 32
    top_k: int = 4
    intermediate: int = 64
    context: int = 192

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def shape(self, layer: int) -> MoEShape:
        """Return the shape of the MoE layer in a block."""
        return MoEShape(layer, self.experts, self.hidden, self.intermediate)

    def to_hugging_face(self) -> dict[str, object]:
        """Return the contents of ``config.json`` for transformers and vLLM."""
        sizes = {key: getattr(self, name) for name, key in _HUGGING_FACE_NAMES.items()}
        # Qwen3-MoE requires the intermediate size of dense blocks, which this model does not have.
        unused = {"intermediate_size": self.top_k * self.intermediate}
        return {**_ARCHITECTURE, **sizes, **unused, "head_dim": self.head_width, "torch_dtype": "bfloat16"}

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the sizes from the contents of ``config.json``."""
        return cls(**{name: int(config[key]) for name, key in _HUGGING_FACE_NAMES.items()})


Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""MoE layer of a block: a function of hidden states ``[T, H]``, expert ids ``[T, K]`` and weights ``[T, K]``.

Returns ``[T, H]``.
"""


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention: a function of layer index, queries ``[B, heads, T, width]``, keys and values ``[B, kv_heads, T, width]``.

Queries and keys are already normalised and rotated. The result has the shape of the queries. Training attends to the
entire text, and serving to a key-value cache.
"""


@dataclass(frozen=True)
class Forward:
    """Result of a forward pass.

    Parameters
    ----------
    logits_BTV
        ``[B, T, 256]``, logits for the next byte.
    router_logits_LNE
        Router logits of each block, ``[B*T, E]``.
    """

    logits_BTV: torch.Tensor
    router_logits_LNE: list[torch.Tensor]


class _Attention(nn.Module):
    """Grouped-query attention with queries and keys normalised per head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._width = config.head_width
        keys = config.kv_heads * self._width
        self.q_proj = _linear(config.hidden, config.hidden)
        self.k_proj = _linear(config.hidden, keys)
        self.v_proj = _linear(config.hidden, keys)
        self.o_proj = _linear(config.hidden, config.hidden, (2 * config.layers) ** -0.5)
        self.q_norm = nn.RMSNorm(self._width, eps=_EPSILON)
        self.k_norm = nn.RMSNorm(self._width, eps=_EPSILON)

    def forward(
        self, layer: int, x_BTH: torch.Tensor, rotation: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        q, k, v = (
            projection(x_BTH).unflatten(-1, (-1, self._width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        mixed = attend(layer, _rotate(q, rotation), _rotate(k, rotation), v.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _SparseMLP(nn.Module):
    """Router of a block. The caller passes the experts, because each rank has only some of them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.choose = Router(config.experts, config.top_k)
        self.gate = _linear(config.hidden, config.experts)

    def forward(self, x_BTH: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_NH = x_BTH.flatten(0, 1)
        logits_NE = self.gate(tokens_NH)
        weights_NK, ids_NK = self.choose(logits_NE)
        return experts(tokens_NH, ids_NK, weights_NK).view_as(x_BTH), logits_NE


class _Block(nn.Module):
    """Attention followed by experts, each applied to the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=_EPSILON)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=_EPSILON)
        self.mlp = _SparseMLP(config)

    def forward(
        self, layer: int, x_BTH: torch.Tensor, rotation: torch.Tensor, attend: Attend, experts: Experts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream after this block and the router logits ``[B*T, E]``."""
        x_BTH = x_BTH + self.self_attn(layer, self.input_layernorm(x_BTH), rotation, attend)
        experts_BTH, logits_NE = self.mlp(self.post_attention_layernorm(x_BTH), experts)
        return x_BTH + experts_BTH, logits_NE


class _Backbone(nn.Module):
    """Model without the output head. Its parameters are under ``model`` in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(BYTES, config.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=_EPSILON)


class ByteTransformer(nn.Module):
    """Transformer that maps bytes to the logits for the next byte. Its parameters are replicated on every rank.

    Raises ``ValueError`` if the number of MoE layers differs from the number of blocks.

    Parameters
    ----------
    config
        Sizes of the model.
    experts
        MoE layer of each block. The layers' weights are not parameters of this module.
    """

    def __init__(self, config: ModelConfig, experts: Sequence[Experts]) -> None:
        super().__init__()
        if len(experts) != config.layers:
            raise ValueError(f"the model has {config.layers} blocks, got {len(experts)} MoE layers")
        self.config = config
        self.model = _Backbone(config)
        self.lm_head = _linear(config.hidden, BYTES)
        self._experts = tuple(experts)

    def route_by(self, router: Router) -> None:
        """Replace the router of every block. The new router receives the same logits."""
        for block in self.model.layers:
            assert isinstance(block, _Block), "the backbone contains only blocks"
            block.mlp.choose = router

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self.lm_head.weight.dtype

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, attend: Attend) -> Forward:
        """Run a forward pass.

        Parameters
        ----------
        tokens_BT
            int64 ``[B, T]``, bytes.
        positions_BT
            int64 ``[B, T]``, position of each byte in its request.
        attend
            Attention function.
        """
        rotation = _rotary_embedding(positions_BT, self.config.head_width, self.dtype)
        x_BTH = self.model.embed_tokens(tokens_BT)
        router_logits = []
        for layer, (block, experts) in enumerate(zip(self.model.layers, self._experts, strict=True)):
            x_BTH, logits_NE = block(layer, x_BTH, rotation, attend, experts)
            router_logits.append(logits_NE)
        return Forward(self.lm_head(self.model.norm(x_BTH)), router_logits)


def _rotary_embedding(positions_BT: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rotary cosines and sines of each position, ``[2, B, 1, T, width / 2]``."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions_BT.device) / width
    angles = positions_BT.unsqueeze(-1) * _ROTARY_BASE**-exponents
    return torch.stack([angles.cos(), angles.sin()]).unsqueeze(2).to(dtype)


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys ``[B, heads, T, width]`` by their positions."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attend_to_the_past(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally to the entire text. This is the ``Attend`` function for training."""
    shared = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(shared, dim=1)
    v = v.repeat_interleave(shared, dim=1)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """Return a randomly initialised linear layer. The output's standard deviation is ``scale`` times the input's."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=scale * inputs**-0.5)
    return linear
