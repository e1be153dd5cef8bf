"""Padding, slicing and gathering of a rank's tokens before dispatch, undone on their outputs after combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from eplb_lab.layer.operators import Operators
from eplb_lab.layer.rank_group import RankGroup, pack_rows, unpack_rows


@dataclass(frozen=True)
class Prepared:
    """The tokens that this rank is to dispatch; padding is zeros throughout."""

    hidden_TH: torch.Tensor
    """Of the tokens' dtype, or int8 where ``scale_T`` is set."""

    routing: tuple[torch.Tensor, ...]
    """``[T, ...]`` each: router logits, or the choices already made (top-k ids, weights, and what is real)."""

    finalize: Callable[[torch.Tensor], torch.Tensor]
    """Brings outputs in the order of the prepared tokens back to this rank's own, whatever the dispatch between."""

    source: slice
    """The part of its own tokens that this rank is the source of: where ranks share tokens, each has one source."""

    active_T: torch.Tensor | None = None
    """bool: the real tokens; ``None`` where all are."""

    scale_T: torch.Tensor | None = None
    """float32: the scale of each int8 token."""

    common_tokens: int | None = None
    """The most tokens that any rank dispatches, where all ranks know the same number without asking."""


def _padded(rows_TX: torch.Tensor, length: int) -> torch.Tensor:
    """Append zeros up to ``length`` rows."""
    missing = length - rows_TX.shape[0]
    return pad(rows_TX, (0, 0) * (rows_TX.ndim - 1) + (0, missing)) if missing else rows_TX


def _own_part(tp: RankGroup, tokens: int) -> slice:
    """Return this rank's consecutive part of so many tokens, the last parts shorter where they do not divide."""
    part = -(-tokens // tp.size)
    return slice(tp.rank * part, (tp.rank + 1) * part)


class All2AllPreparation:
    """Pads the tokens to a multiple of the tensor-parallel size; the way back gathers the slices."""

    def __init__(self, tp: RankGroup) -> None:
        self._tp = tp

    def prepare(
        self, hidden_TH: torch.Tensor, routing: tuple[torch.Tensor, ...], length: int | None = None
    ) -> Prepared:
        """Take this rank's slice; ``length``, the most tokens of any rank, is passed on and not padded to."""
        own = hidden_TH.shape[0]
        common = None if length is None else -(-length // self._tp.size)
        return self._sliced(hidden_TH, routing, own + -own % self._tp.size, _own_part(self._tp, own), common)

    def _sliced(
        self,
        hidden_TH: torch.Tensor,
        routing: tuple[torch.Tensor, ...],
        length: int,
        source: slice,
        common_tokens: int | None,
    ) -> Prepared:
        """Pad to ``length`` and take a part; back, gather all ranks' parts into a new tensor, without the padding.

        New, because the tensor that was sliced may be shared with the shared experts.
        """
        own, tp = hidden_TH.shape[0], self._tp
        part_TH, *parts = (_padded(rows_TX, length)[source] for rows_TX in (hidden_TH, *routing))
        active_T = source.start + torch.arange(part_TH.shape[0], device=part_TH.device) < own
        return Prepared(
            part_TH,
            tuple(parts),
            lambda out_TH: tp.all_gather(out_TH)[:own],
            source,
            active_T if length != own else None,
            common_tokens=common_tokens,
        )


class MC2Preparation(All2AllPreparation):
    """Pads to the length common to the step, then slices over tensor-parallel ranks.

    The ranks of ``ep`` agree about the length: the largest number of tokens of any, at least one.
    """

    def __init__(self, ep: RankGroup, tp: RankGroup) -> None:
        super().__init__(tp)
        self._ep = ep

    def prepare(
        self, hidden_TH: torch.Tensor, routing: tuple[torch.Tensor, ...], length: int | None = None
    ) -> Prepared:
        """Take this rank's padded slice, with its mask; without ``length`` the ranks exchange theirs, and wait."""
        own, tp = hidden_TH.shape[0], self._tp.size
        if length is None:
            length = max(tokens for (tokens,) in self._ep.gather_numbers(own, device=hidden_TH.device))
        elif own > length:
            raise ValueError(f"MC2: {own} tokens are more than the step's common length of {length}")
        # A multiple of the tensor-parallel size, at least one each: the operators take no empty batch.
        length = max(length + -length % tp, tp)
        return self._sliced(hidden_TH, routing, length, _own_part(self._tp, length), length // tp)


def _gather(
    group: RankGroup, hidden_TH: torch.Tensor, routing: Sequence[torch.Tensor], length: int | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather the tokens of all ranks in order of rank, each rank's padded to ``length``, with their routing.

    Without ``length`` the ranks first exchange their numbers of tokens, and wait for them. Raises ``ValueError`` where
    there are more tokens than that, and without it on all ranks alike where they disagree about the bytes of a token.
    """
    columns = [hidden_TH, *routing]
    flat = [part.unsqueeze(1) if part.ndim == 1 else part.flatten(1) for part in columns]
    packed_TB = pack_rows(flat)
    own = packed_TB.shape[0]
    if length is None:
        everyone = group.gather_numbers(*packed_TB.shape, device=packed_TB.device)
        sizes, widths = zip(*everyone, strict=True)
        if len(set(widths)) > 1:
            raise ValueError(
                f"gathering tokens: ranks disagree about bytes per token {list(widths)}; "
                "hidden and routing must have the same width and dtype on all ranks"
            )
        length = int(max(sizes))
    elif own > length:
        raise ValueError(f"gathering: {own} tokens are more than the step's common length of {length}")
    parts = unpack_rows(group.all_gather(_padded(packed_TB, length)), flat)
    hidden_NH, *gathered = (
        part.view(part.shape[0], *like.shape[1:]) for part, like in zip(parts, columns, strict=True)
    )
    return hidden_NH, gathered


class AllGatherPreparation:
    """Pads to the step's length and gathers; the way back reduce-scatters partial sums and cuts off the padding.

    Gathers over one of the ``groups`` after the other: data-parallel ranks, then those of prefill context parallelism.
    Ranks of ``tp`` have the same tokens and other experts: their partial sums are added up last. With ``quantize_with``
    tokens are quantized to int8 before the gather, so that less travels (W8A8).
    """

    def __init__(
        self,
        groups: Sequence[RankGroup],
        tp: RankGroup,
        quantize_with: Operators | None = None,
    ) -> None:
        self._groups = list(groups)
        self._tp = tp
        self._operators = quantize_with

    def prepare(
        self, hidden_TH: torch.Tensor, routing: tuple[torch.Tensor, ...], length: int | None = None
    ) -> Prepared:
        """Gather the tokens of all ranks, in int8 with their scales where they are quantized."""
        dtype, gathered = hidden_TH.dtype, [*routing]
        gathered.append(torch.ones(hidden_TH.shape[0], dtype=torch.bool, device=hidden_TH.device))
        if self._operators is not None and hidden_TH.shape[0]:
            hidden_TH, scale_T = self._operators.npu_dynamic_quant(hidden_TH)
            gathered.append(scale_T)
        elif self._operators is not None:
            gathered.append(hidden_TH.new_empty(0, dtype=torch.float32))
            hidden_TH = hidden_TH.to(torch.int8)
        source = _own_part(self._tp, hidden_TH.shape[0])
        owns: list[int] = []
        for group in self._groups:
            owns.append(hidden_TH.shape[0])
            hidden_TH, gathered = _gather(group, hidden_TH, gathered, length)
            length = None if length is None else length * group.size

        def finalize(out_TH: torch.Tensor) -> torch.Tensor:
            """Sum over all ranks and cut to this rank's own."""
            for group, own in zip(reversed(self._groups), reversed(owns), strict=True):
                out_TH = group.reduce_scatter(out_TH)[:own]
            return self._tp.all_reduce(out_TH).to(dtype)

        scale_N = None if self._operators is None else gathered.pop()
        *routed, active_N = gathered
        return Prepared(hidden_TH, tuple(routed), finalize, source, active_N, scale_N)


Preparation = All2AllPreparation | AllGatherPreparation
"""Gives a dispatcher the tokens that it needs; nothing of a call stays on the object."""
