"""The sizes of a byte-level Mixture-of-Experts transformer."""

from __future__ import annotations

from dataclasses import dataclass

from worker_agent.moe import MoEShape

BYTES = 256
"""Size of the vocabulary: a token is a byte."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model; the defaults are those of the embedded one.

    Parameters
    ----------
    layers, hidden, heads
        Blocks, width of the residual stream H, and attention heads, each ``hidden / heads`` wide.
    experts, top_k, intermediate
        E, K and I of every block. One expert with K = 1 is a dense model.
    context
        Most tokens that a request can have.

    Raises ``ValueError`` where they do not fit together.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    experts: int = 32
    top_k: int = 4
    intermediate: int = 64
    context: int = 192

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.experts, self.intermediate, self.context) < 1:
            raise ValueError(f"all sizes of a model must be positive, got {self}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden must be an even multiple of heads, got {self.hidden} and {self.heads}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be 1..{self.experts}, the number of experts, got {self.top_k}")

    @property
    def dense(self) -> ModelConfig:
        """A dense model in which each token meets as many parameters of feed-forward networks as in this one."""
        return ModelConfig(
            self.layers, self.hidden, self.heads, 1, 1, self.top_k * self.intermediate, self.context
        )

    def shape(self, layer: int) -> MoEShape:
        """The MoE layer of a block."""
        return MoEShape(layer, self.experts, self.hidden, self.intermediate)
