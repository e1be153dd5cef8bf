"""Tokens that all tensor-parallel ranks have, shared out among them and brought together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from worker_agent.moe.prepare.interface import Tokens
from worker_agent.moe.rank_group import RankGroup


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
