"""Before MC2: every rank gives equally many tokens, and a mask tells which of them are real."""

from __future__ import annotations

import torch

from worker_agent.moe.prepare.interface import Prepared, Tokens
from worker_agent.moe.prepare.slices import Sliced, gathered, own_part, padded_tokens, sliced
from worker_agent.moe.rank_group import RankGroup


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
    length
        The common length where the host knows it; the ranks then need not ask each other. Raises ``ValueError``
        where a rank has more tokens.
    """

    def __init__(
        self, ep: RankGroup, tp: RankGroup, *, whole: bool = False, length: int | None = None
    ) -> None:
        self._ep = ep
        self._tp = tp
        self._slices = tp.size > 1 and not whole
        self._length = length

    def prepare(self, tokens: Tokens) -> Prepared[Sliced]:
        """This rank's padded slice, with its mask."""
        own, device = tokens.hidden_TH.shape[0], tokens.hidden_TH.device
        length = self._common_length(own, device)
        padded = padded_tokens(tokens, length)
        active_T = torch.arange(length, device=device) < own
        if not self._slices:
            metadata = Sliced(own, sliced=False)
            return Prepared(padded.hidden_TH, padded.routing, metadata, active_T, padded.hidden_TH.shape)
        source = own_part(self._tp, length)
        part = sliced(padded, source)
        return Prepared(
            part.hidden_TH,
            part.routing,
            Sliced(own, sliced=True),
            active_T[source],
            padded.hidden_TH.shape,
            source=source,
        )

    def finalize(self, out_TH: torch.Tensor, metadata: Sliced) -> torch.Tensor:
        """The whole, on all tensor-parallel ranks."""
        return gathered(self._tp, out_TH, metadata)

    def _common_length(self, own: int, device: torch.device) -> int:
        """A multiple of the tensor-parallel size, at least one each: the operators take no empty batch."""
        if self._length is None:
            longest = max(tokens for (tokens,) in self._ep.tell(own, device=device))
        elif own > self._length:
            raise ValueError(f"MC2: {own} tokens are more than the common length of {self._length}")
        else:
            longest = self._length
        parts = self._tp.size if self._slices else 1
        return max(longest + -longest % parts, parts)
