"""Before an all-to-all: each tensor-parallel rank takes its slice of the tokens that they all have."""

from __future__ import annotations

import torch

from worker_agent.moe.prepare.interface import Prepared, Tokens
from worker_agent.moe.prepare.slices import Sliced, gathered, own_part, padded_tokens, sliced
from worker_agent.moe.rank_group import RankGroup


class All2AllPreparation:
    """Pads the tokens to a multiple of the tensor-parallel size; the way back gathers the slices.

    ``whole`` skips both: each rank then keeps all its tokens, as where shared experts run data-parallel or the
    all-reduce is replaced.
    """

    def __init__(self, tp: RankGroup, *, whole: bool = False) -> None:
        self._tp = tp
        self._slices = tp.size > 1 and not whole

    def prepare(self, tokens: Tokens) -> Prepared[Sliced]:
        """This rank's slice."""
        own = tokens.hidden_TH.shape[0]
        if not self._slices:
            return Prepared(tokens.hidden_TH, tokens.routing, Sliced(own, sliced=False))
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
            source=source,
        )

    def finalize(self, out_TH: torch.Tensor, metadata: Sliced) -> torch.Tensor:
        """The whole, on all ranks."""
        return gathered(self._tp, out_TH, metadata)
