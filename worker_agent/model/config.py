"""The sizes of a byte-level Mixture-of-Experts transformer, and the ``config.json`` of a checkpoint of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from worker_agent.moe import MoEShape

BYTES = 256
"""Size of the vocabulary: a token is a byte."""

ROTARY_BASE = 10_000.0
EPSILON = 1e-6

_ARCHITECTURE: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": BYTES,
    "hidden_act": "silu",
    "rms_norm_eps": EPSILON,
    "rope_theta": ROTARY_BASE,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""What all models of this room have in common, by the names of ``config.json``."""

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
    """Sizes of a model of the Qwen3-MoE architecture; the defaults are those of the embedded one.

    Parameters
    ----------
    layers, hidden
        Blocks, and width of the residual stream H.
    heads, kv_heads
        Attention heads, each ``hidden / heads`` wide, and heads of keys and values, each shared by
        ``heads / kv_heads`` of them.
    experts, top_k, intermediate
        E, K and I of every block. One expert with K = 1 is a dense model.
    context
        Most tokens that a request can have.

    Raises
    ------
    ValueError
        Where they do not fit together.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    experts: int = 32
    top_k: int = 4
    intermediate: int = 64
    context: int = 192

    def __post_init__(self) -> None:
        sizes = [getattr(self, field.name) for field in fields(self)]
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"all sizes of a model must be positive integers, got {self}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden must be an even multiple of heads, got {self.hidden} and {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be 1..{self.experts}, the number of experts, got {self.top_k}")

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def dense(self) -> ModelConfig:
        """A dense model in which each token meets as many parameters of feed-forward networks as in this one."""
        width = self.top_k * self.intermediate
        return ModelConfig(self.layers, self.hidden, self.heads, self.kv_heads, 1, 1, width, self.context)

    def shape(self, layer: int) -> MoEShape:
        """The MoE layer of a block."""
        return MoEShape(layer, self.experts, self.hidden, self.intermediate)

    def to_hugging_face(self) -> dict[str, object]:
        """The contents of ``config.json``, with which transformers and vLLM load the model."""
        sizes = {theirs: getattr(self, ours) for ours, theirs in _HUGGING_FACE_NAMES.items()}
        # Qwen3-MoE has a size for blocks without experts; this model has none of them.
        unused = {"intermediate_size": self.top_k * self.intermediate}
        return {**_ARCHITECTURE, **sizes, **unused, "head_dim": self.head_width, "torch_dtype": "bfloat16"}

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, object]) -> ModelConfig:
        """Read the contents of ``config.json``; ``ValueError`` where it is of a model that is not served here."""
        for name, expected in _ARCHITECTURE.items():
            if config.get(name) != expected:
                raise ValueError(f"{name} must be {expected!r}, got {config.get(name)!r}")
        missing = [theirs for theirs in _HUGGING_FACE_NAMES.values() if theirs not in config]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        sizes: dict[str, object] = {ours: config[theirs] for ours, theirs in _HUGGING_FACE_NAMES.items()}
        read = cls(**sizes)  # type: ignore[arg-type] # checked by __post_init__
        if config.get("head_dim") != read.head_width:
            raise ValueError(f"head_dim must be {read.head_width}, got {config.get('head_dim')!r}")
        return read
