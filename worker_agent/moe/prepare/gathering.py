"""All ranks' tokens brought to all ranks, and partial outputs brought back to the tokens' owners."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.packing import pack_rows, unpack_rows
from worker_agent.moe.prepare.interface import Tokens
from worker_agent.moe.prepare.slices import padded_tokens
from worker_agent.moe.rank_group import RankGroup


@dataclass(frozen=True)
class Gathered:
    """The tokens of all ranks, each rank's padded to the longest, in order of rank."""

    tokens: Tokens
    active_N: torch.Tensor
    own: int


def gather(group: RankGroup, tokens: Tokens, active_T: torch.Tensor) -> Gathered:
    """Two exchanges: sizes, then tokens with their routing and ``active``, bool ``[T]``.

    Raises ``ValueError`` on all ranks alike where they disagree about the bytes of a token.
    """
    columns = [tokens.hidden_TH, *tokens.routing, active_T]
    flat = [part.unsqueeze(1) if part.ndim == 1 else part.flatten(1) for part in columns]
    packed_TB = pack_rows(flat)
    own = packed_TB.shape[0]
    told = group.tell(own, packed_TB.shape[1], device=packed_TB.device)
    sizes, widths = zip(*told, strict=True)
    if len(set(widths)) > 1:
        raise ValueError(
            f"gathering tokens: ranks disagree about bytes per token {list(widths)}; "
            "hidden and routing must have the same width and dtype on all ranks"
        )
    longest = padded_tokens(Tokens(packed_TB, ()), max(sizes)).hidden_TH
    parts = unpack_rows(group.all_gather(longest), flat)
    hidden_NH, *routing = [
        part.view(part.shape[0], *like.shape[1:]) for part, like in zip(parts, columns, strict=True)
    ]
    return Gathered(Tokens(hidden_NH, tuple(routing[:-1])), routing[-1], own)


def scatter(group: RankGroup, partial_NH: torch.Tensor, own: int) -> torch.Tensor:
    """The sum of all ranks' partial outputs, cut to this rank's own tokens."""
    return group.reduce_scatter(partial_NH)[:own]
