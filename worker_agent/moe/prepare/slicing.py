"""Before an all-to-all or MC2: tokens padded, and sliced over the tensor-parallel ranks that all have them.

The interface that all preparations share is here as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch.nn.functional import pad

from worker_agent.moe.rank_group import RankGroup

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

    common_tokens: int | None = None
    """The most tokens that any rank dispatches, where all ranks know the same number without asking."""

    source: slice = field(default_factory=lambda: slice(None))
    """Which of its own tokens this rank is the source of: where ranks share tokens, each has one source."""


class Preparation(Protocol[Metadata]):
    """``finalize`` undoes what ``prepare`` did, whatever the dispatch between them: own tokens in, own outputs out.

    Nothing of a call stays on the object.
    """

    def prepare(self, tokens: Tokens, length: int | None = None) -> Prepared[Metadata]:
        """Pad, slice or gather this rank's tokens.

        ``length`` is what all ranks pad to in this step, where the host knows it and the preparation pads to one.
        """
        ...

    def finalize(self, out_TH: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Bring outputs in the order of the prepared tokens back to this rank's own."""
        ...


@dataclass(frozen=True)
class Sliced:
    """What ``gathered`` must know: the tokens before padding, and whether they were sliced."""

    tokens: int
    sliced: bool


def padded_tokens(tokens: Tokens, length: int) -> Tokens:
    """The tokens with zeros after them, ``length`` in all."""
    missing = length - tokens.hidden_TH.shape[0]
    if not missing:
        return tokens
    return Tokens(
        _padded(tokens.hidden_TH, missing), tuple(_padded(part, missing) for part in tokens.routing)
    )


def own_part(tp: RankGroup, tokens: int) -> slice:
    """This rank's consecutive part of so many tokens, the last parts shorter where they do not divide."""
    part = -(-tokens // tp.size)
    return slice(tp.rank * part, (tp.rank + 1) * part)


def sliced(tokens: Tokens, own: slice) -> Tokens:
    """A part of the tokens."""
    return Tokens(tokens.hidden_TH[own], tuple(each[own] for each in tokens.routing))


def gathered(tp: RankGroup, out_TH: torch.Tensor, metadata: Sliced) -> torch.Tensor:
    """The slices of all ranks in a new tensor, without the padding.

    New, because the tensor that was sliced may be shared with the shared experts.
    """
    whole_TH = tp.all_gather(out_TH) if metadata.sliced else out_TH
    return whole_TH[: metadata.tokens]


def _padded(rows_TX: torch.Tensor, missing: int) -> torch.Tensor:
    return pad(rows_TX, (0, 0) * (rows_TX.ndim - 1) + (0, missing))


class All2AllPreparation:
    """Pads the tokens to a multiple of the tensor-parallel size; the way back gathers the slices.

    ``whole`` skips both: each rank then keeps all its tokens, as where shared experts run data-parallel or the
    all-reduce is replaced.
    """

    def __init__(self, tp: RankGroup, *, whole: bool = False) -> None:
        self._tp = tp
        self._slices = tp.size > 1 and not whole

    def prepare(self, tokens: Tokens, length: int | None = None) -> Prepared[Sliced]:
        """This rank's slice; ``length``, the most tokens of any rank, is passed on and not padded to."""
        own = tokens.hidden_TH.shape[0]
        if not self._slices:
            return Prepared(tokens.hidden_TH, tokens.routing, Sliced(own, sliced=False), common_tokens=length)
        padded = padded_tokens(tokens, own + -own % self._tp.size)
        source = own_part(self._tp, own)
        part = sliced(padded, source)
        active_T = None
        if padded is not tokens:
            place_T = torch.arange(part.hidden_TH.shape[0], device=part.hidden_TH.device)
            active_T = source.start + place_T < own
        return Prepared(
            part.hidden_TH,
            part.routing,
            Sliced(own, sliced=True),
            active_T,
            padded.hidden_TH.shape,
            common_tokens=None if length is None else -(-length // self._tp.size),
            source=source,
        )

    def finalize(self, out_TH: torch.Tensor, metadata: Sliced) -> torch.Tensor:
        """The whole, on all ranks."""
        return gathered(self._tp, out_TH, metadata)


class MC2Preparation:
    """Pads to the length common to the step, then slices tokens and mask over tensor-parallel ranks.

    Parameters
    ----------
    ep
        The ranks that MC2 runs on, who agree about the length: the largest number of tokens of any, at least one.
    tp
        The ranks that have the same tokens.
    whole
        Keep all tokens on each rank, as ``All2AllPreparation`` may.
    """

    def __init__(self, ep: RankGroup, tp: RankGroup, *, whole: bool = False) -> None:
        self._ep = ep
        self._tp = tp
        self._slices = tp.size > 1 and not whole

    def prepare(self, tokens: Tokens, length: int | None = None) -> Prepared[Sliced]:
        """This rank's padded slice, with its mask; without ``length`` the ranks exchange theirs, and wait for it."""
        own, device = tokens.hidden_TH.shape[0], tokens.hidden_TH.device
        length = self._common_length(own, length, device)
        padded = padded_tokens(tokens, length)
        active_T = torch.arange(length, device=device) < own
        if not self._slices:
            return Prepared(
                padded.hidden_TH,
                padded.routing,
                Sliced(own, sliced=False),
                active_T,
                padded.hidden_TH.shape,
                common_tokens=length,
            )
        source = own_part(self._tp, length)
        part = sliced(padded, source)
        return Prepared(
            part.hidden_TH,
            part.routing,
            Sliced(own, sliced=True),
            active_T[source],
            padded.hidden_TH.shape,
            common_tokens=part.hidden_TH.shape[0],
            source=source,
        )

    def finalize(self, out_TH: torch.Tensor, metadata: Sliced) -> torch.Tensor:
        """The whole, on all tensor-parallel ranks."""
        return gathered(self._tp, out_TH, metadata)

    def _common_length(self, own: int, length: int | None, device: torch.device) -> int:
        """A multiple of the tensor-parallel size, at least one each: the operators take no empty batch."""
        if length is None:
            longest = max(tokens for (tokens,) in self._ep.gather_numbers(own, device=device))
        elif own > length:
            raise ValueError(f"MC2: {own} tokens are more than the step's common length of {length}")
        else:
            longest = length
        parts = self._tp.size if self._slices else 1
        return max(longest + -longest % parts, parts)
