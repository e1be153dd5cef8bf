"""Before local experts: every data-parallel rank gets the tokens of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_agent.moe.prepare.gathering import gather, scatter
from worker_agent.moe.prepare.interface import Prepared, Tokens
from worker_agent.moe.prepare.slices import own_part
from worker_agent.moe.rank_group import RankGroup


@dataclass(frozen=True)
class GatheredMetadata:
    """This rank's number of tokens before each gather, and their dtype."""

    owns: list[int]
    dtype: torch.dtype


class AllGatherPreparation:
    """Pads to the longest rank and gathers; the way back reduce-scatters partial sums and cuts off the padding.

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

    def prepare(self, tokens: Tokens) -> Prepared[GatheredMetadata]:
        """The tokens of all ranks."""
        active_T = torch.ones(tokens.hidden_TH.shape[0], dtype=torch.bool, device=tokens.hidden_TH.device)
        source = slice(None) if self._tp is None else own_part(self._tp, active_T.shape[0])
        owns: list[int] = []
        metadata = GatheredMetadata(owns, tokens.hidden_TH.dtype)
        for group in self._groups:
            gathered = gather(group, tokens, active_T)
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
