"""The one interface of all preparations: what goes in, what comes out, what is carried in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

Metadata = TypeVar("Metadata")
"""What ``finalize`` must know of ``prepare``; each preparation has its own type."""


@dataclass(frozen=True)
class Tokens:
    """A rank's tokens, and what is known of where each goes."""

    hidden_TH: torch.Tensor
    routing: tuple[torch.Tensor, ...]
    """``[T, ...]`` each: router logits, or the choices already made (top-k ids, weights, and what is real)."""


@dataclass(frozen=True)
class Prepared(Generic[Metadata]):
    """The tokens that this rank is to dispatch; padding is zeros throughout."""

    hidden_TH: torch.Tensor
    """Of the tokens' dtype, or int8 where ``scale_T`` is set."""

    routing: tuple[torch.Tensor, ...]
    metadata: Metadata
    active_T: torch.Tensor | None = None
    """bool: which tokens are real; ``None`` where all are. MC2's mask."""

    padded_shape: torch.Size | None = None
    """The shape of this rank's hidden states after padding and before slicing, where they were padded."""

    scale_T: torch.Tensor | None = None
    """float32: what each int8 token is scaled back by."""

    source: slice = field(default_factory=lambda: slice(None))
    """Which of its own tokens this rank is the source of: where ranks share tokens, each has one source."""


class Preparation(Protocol[Metadata]):
    """``finalize`` undoes what ``prepare`` did, whatever the dispatch between them: own tokens in, own outputs out.

    Nothing of a call stays on the object.
    """

    def prepare(self, tokens: Tokens) -> Prepared[Metadata]:
        """Pad, slice or gather this rank's tokens."""
        ...

    def finalize(self, out_TH: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Bring outputs in the order of the prepared tokens back to this rank's own."""
        ...
