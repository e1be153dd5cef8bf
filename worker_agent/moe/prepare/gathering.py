"""Before local experts: every rank gets the tokens of all ranks, and the way back sums the partial outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_agent.moe.operators import Operators
from worker_agent.moe.prepare.slicing import Prepared, Tokens, own_part, padded_tokens
from worker_agent.moe.rank_group import RankGroup, pack_rows, unpack_rows


@dataclass(frozen=True)
class Gathered:
    """The tokens of all ranks, each rank's padded to the longest, in order of rank."""

    tokens: Tokens
    active_N: torch.Tensor
    own: int


def gather(group: RankGroup, tokens: Tokens, active_T: torch.Tensor, length: int | None = None) -> Gathered:
    """The tokens of all ranks with their routing and ``active``, bool ``[T]``, each rank's padded to ``length``.

    Without ``length`` the ranks first exchange their numbers of tokens, and wait for them. Raises ``ValueError`` where
    there are more tokens than that, and without it on all ranks alike where they disagree about the bytes of a token.
    """
    columns = [tokens.hidden_TH, *tokens.routing, active_T]
    flat = [part.unsqueeze(1) if part.ndim == 1 else part.flatten(1) for part in columns]
    packed_TB = pack_rows(flat)
    own = packed_TB.shape[0]
    if length is None:
        length = _longest(group, packed_TB)
    elif own > length:
        raise ValueError(f"gathering: {own} tokens are more than the step's common length of {length}")
    longest = padded_tokens(Tokens(packed_TB, ()), length).hidden_TH
    parts = unpack_rows(group.all_gather(longest), flat)
    hidden_NH, *routing = [
        part.view(part.shape[0], *like.shape[1:]) for part, like in zip(parts, columns, strict=True)
    ]
    return Gathered(Tokens(hidden_NH, tuple(routing[:-1])), routing[-1], own)


def _longest(group: RankGroup, packed_TB: torch.Tensor) -> int:
    """The most tokens of any rank."""
    everyone = group.gather_numbers(*packed_TB.shape, device=packed_TB.device)
    sizes, widths = zip(*everyone, strict=True)
    if len(set(widths)) > 1:
        raise ValueError(
            f"gathering tokens: ranks disagree about bytes per token {list(widths)}; "
            "hidden and routing must have the same width and dtype on all ranks"
        )
    return int(max(sizes))


def scatter(group: RankGroup, partial_NH: torch.Tensor, own: int) -> torch.Tensor:
    """The sum of all ranks' partial outputs, cut to this rank's own tokens."""
    return group.reduce_scatter(partial_NH)[:own]


@dataclass(frozen=True)
class GatheredMetadata:
    """This rank's number of tokens before each gather, and their dtype."""

    owns: list[int]
    dtype: torch.dtype


class AllGatherPreparation:
    """Pads to the step's length and gathers; the way back reduce-scatters partial sums and cuts off the padding.

    Parameters
    ----------
    groups
        The ranks to gather over, one group after the other: data-parallel ranks, then those of prefill context
        parallelism where there are any.
    tp
        Ranks that have the same tokens and other experts: their partial sums are added up last.
    """

    def __init__(self, groups: Sequence[RankGroup], tp: RankGroup | None = None) -> None:
        self._groups = list(groups)
        self._tp = tp

    def prepare(self, tokens: Tokens, length: int | None = None) -> Prepared[GatheredMetadata]:
        """The tokens of all ranks."""
        active_T = torch.ones(tokens.hidden_TH.shape[0], dtype=torch.bool, device=tokens.hidden_TH.device)
        source = slice(None) if self._tp is None else own_part(self._tp, active_T.shape[0])
        owns: list[int] = []
        metadata = GatheredMetadata(owns, tokens.hidden_TH.dtype)
        for group in self._groups:
            gathered = gather(group, tokens, active_T, length)
            length = None if length is None else length * group.size
            owns.append(gathered.own)
            tokens, active_T = gathered.tokens, gathered.active_N
        return Prepared(
            tokens.hidden_TH, tokens.routing, metadata, active_T, tokens.hidden_TH.shape, source=source
        )

    def finalize(self, out_TH: torch.Tensor, metadata: GatheredMetadata) -> torch.Tensor:
        """This rank's own outputs, summed over all ranks."""
        for group, own in zip(reversed(self._groups), reversed(metadata.owns), strict=True):
            out_TH = scatter(group, out_TH, own)
        if self._tp is not None:
            out_TH = self._tp.all_reduce(out_TH)
        return out_TH.to(metadata.dtype)


class SequenceParallelPreparation:
    """Gathers over the whole EP group; the way back reduce-scatters over it.

    With ``quantize_with`` tokens are quantized to int8 before the gather, so that less travels (W8A8).
    """

    def __init__(self, ep: RankGroup, quantize_with: Operators | None = None) -> None:
        self._ep = ep
        self._operators = quantize_with

    def prepare(self, tokens: Tokens, length: int | None = None) -> Prepared[GatheredMetadata]:
        """The tokens of all ranks, in int8 with their scales where they were quantized."""
        hidden_TH, routing = tokens.hidden_TH, tokens.routing
        if self._operators is not None:
            int8_TH = hidden_TH.new_empty(hidden_TH.shape, dtype=torch.int8)
            scale_T = hidden_TH.new_empty(hidden_TH.shape[0], dtype=torch.float32)
            if hidden_TH.shape[0]:
                int8_TH, scale_T = self._operators.npu_dynamic_quant(hidden_TH)
            tokens = Tokens(int8_TH, (*routing, scale_T))
        active_T = torch.ones(hidden_TH.shape[0], dtype=torch.bool, device=hidden_TH.device)
        gathered = gather(self._ep, tokens, active_T, length)
        metadata = GatheredMetadata([gathered.own], hidden_TH.dtype)
        everything = gathered.tokens
        scale_N = everything.routing[-1] if self._operators is not None else None
        return Prepared(
            everything.hidden_TH,
            everything.routing[: len(routing)],
            metadata,
            gathered.active_N,
            everything.hidden_TH.shape,
            scale_N,
        )

    def finalize(self, out_TH: torch.Tensor, metadata: GatheredMetadata) -> torch.Tensor:
        """This rank's own outputs, summed over the group."""
        return scatter(self._ep, out_TH, metadata.owns[0]).to(metadata.dtype)
