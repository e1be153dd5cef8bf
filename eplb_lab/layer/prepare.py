"""Prepare a rank's tokens for dispatch (padding, slicing, gathering), and undo the preparation for their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from eplb_lab.layer.operators import Operators
from eplb_lab.layer.rank_group import RankGroup, pack_rows, unpack_rows


@dataclass(frozen=True)
class Prepared:
    """Result of a preparation: the tokens that this rank dispatches. All padding is zeros."""

    hidden_TH: torch.Tensor
    """Tokens in the layer's dtype, or int8 if ``scale_T`` is set."""

    routing: tuple[torch.Tensor, ...]
    """Routing of the tokens, ``[T, ...]`` each: router logits, or choices already made (ids and weights)."""

    finalize: Callable[[torch.Tensor], torch.Tensor]
    """Converts outputs, in the order of the prepared tokens, to the outputs of the rank's own tokens."""

    source: slice
    """Slice of the rank's own tokens for which it is the source. If ranks share tokens, each token has one source."""

    active_T: torch.Tensor | None = None
    """bool: mask of the real tokens; ``None`` if all are real."""

    scale_T: torch.Tensor | None = None
    """float32: scale of each int8 token."""

    common_tokens: int | None = None
    """Largest number of tokens that any rank dispatches, if all ranks know it without an exchange."""


def _padded(rows_TX: torch.Tensor, length: int) -> torch.Tensor:
    """Pad with rows of zeros up to ``length`` rows."""
    missing = length - rows_TX.shape[0]
    return pad(rows_TX, (0, 0) * (rows_TX.ndim - 1) + (0, missing)) if missing else rows_TX


def _rank_slice(tp: RankGroup, tokens: int) -> slice:
    """Return this rank's slice of ``tokens`` consecutive tokens.

    If the tokens do not divide evenly among the ranks, the last slices are shorter or empty.
    """
    size = -(-tokens // tp.size)
    return slice(tp.rank * size, (tp.rank + 1) * size)


class All2AllPreparation:
    """Preparation that slices the tokens across tensor-parallel ranks and gathers their outputs.

    Tokens are padded to a multiple of the number of ranks.
    """

    def __init__(self, tp: RankGroup) -> None:
        self._tp = tp

    def prepare(
        self, hidden_TH: torch.Tensor, routing: tuple[torch.Tensor, ...], length: int | None = None
    ) -> Prepared:
        """Return this rank's slice.

        ``length``, the largest number of tokens on any rank, is only used for ``Prepared.common_tokens``. Tokens are
        not padded to it.
        """
        tokens = hidden_TH.shape[0]
        common = None if length is None else -(-length // self._tp.size)
        padded_length = tokens + -tokens % self._tp.size
        return self._sliced(hidden_TH, routing, padded_length, _rank_slice(self._tp, tokens), common)

    def _sliced(
        self,
        hidden_TH: torch.Tensor,
        routing: tuple[torch.Tensor, ...],
        length: int,
        source: slice,
        common_tokens: int | None,
    ) -> Prepared:
        """Pad the tokens to ``length`` and return the slice ``source``.

        ``finalize`` gathers the slices of all ranks and drops the padding. It returns a new tensor, because the input
        tensor may be shared with the shared experts.
        """
        tokens = hidden_TH.shape[0]
        tp = self._tp
        slice_TH, *routing_slices = (_padded(rows_TX, length)[source] for rows_TX in (hidden_TH, *routing))
        active_T = source.start + torch.arange(slice_TH.shape[0], device=slice_TH.device) < tokens
        return Prepared(
            slice_TH,
            tuple(routing_slices),
            lambda out_TH: tp.all_gather(out_TH)[:tokens],
            source,
            active_T if length != tokens else None,
            common_tokens=common_tokens,
        )


class MC2Preparation(All2AllPreparation):
    """Preparation that pads the tokens to the step's common length before it slices them.

    The common length is the largest number of tokens on any rank of ``ep``, but at least one.
    """

    def __init__(self, ep: RankGroup, tp: RankGroup) -> None:
        super().__init__(tp)
        self._ep = ep

    def prepare(
        self, hidden_TH: torch.Tensor, routing: tuple[torch.Tensor, ...], length: int | None = None
    ) -> Prepared:
        """Return this rank's padded slice and its mask.

        If ``length`` is ``None``, the ranks exchange their token counts and wait for the result. Raises ``ValueError``
        if this rank has more tokens than ``length``.
        """
        tokens = hidden_TH.shape[0]
        tp_size = self._tp.size
        if length is None:
            length = max(count for (count,) in self._ep.gather_numbers(tokens, device=hidden_TH.device))
        elif tokens > length:
            raise ValueError(f"MC2: {tokens} tokens exceed the step's common length of {length}")
        # Each rank needs at least one token, because the operators do not support an empty batch.
        length = max(length + -length % tp_size, tp_size)
        return self._sliced(hidden_TH, routing, length, _rank_slice(self._tp, length), length // tp_size)


def _gather(
    group: RankGroup, hidden_TH: torch.Tensor, routing: Sequence[torch.Tensor], length: int | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather the tokens of all ranks and their routing, in rank order.

    Each rank's tokens are padded to ``length``. If it is ``None``, the ranks first exchange their token counts and wait
    for the result.

    Raises ``ValueError`` if this rank has more tokens than ``length``. If ``length`` is ``None``, all ranks also raise
    ``ValueError`` if the tokens' size in bytes differs between ranks. Otherwise, such a difference is not detected.
    """
    columns = [hidden_TH, *routing]
    flat_columns = [column.unsqueeze(1) if column.ndim == 1 else column.flatten(1) for column in columns]
    packed_TB = pack_rows(flat_columns)
    tokens = packed_TB.shape[0]
    if length is None:
        shapes = group.gather_numbers(*packed_TB.shape, device=packed_TB.device)
        counts, widths = zip(*shapes, strict=True)
        if len(set(widths)) > 1:
            raise ValueError(
                f"gathering tokens: ranks disagree about bytes per token {list(widths)}; "
                "hidden and routing must have the same width and dtype on all ranks"
            )
        length = int(max(counts))
    elif tokens > length:
        raise ValueError(f"gathering tokens: {tokens} tokens exceed the step's common length of {length}")
    gathered_columns = unpack_rows(group.all_gather(_padded(packed_TB, length)), flat_columns)
    hidden_NH, *gathered = (
        rows.view(rows.shape[0], *column.shape[1:])
        for rows, column in zip(gathered_columns, columns, strict=True)
    )
    return hidden_NH, gathered


class AllGatherPreparation:
    """Preparation that pads the tokens to a common length and gathers them from all ranks.

    ``finalize`` reduce-scatters the partial sums of the outputs and drops the padding.

    Parameters
    ----------
    groups
        Groups to gather over, in this order: the data-parallel group, then the prefill-context-parallel group.
    tp
        Ranks that have the same tokens but different experts. Their partial sums are added last.
    quantize_with
        Operators that quantise tokens to int8 before the gather, so that fewer bytes are sent (W8A8).
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
        """Gather the tokens of all ranks, as int8 with their scales if they are quantised."""
        dtype = hidden_TH.dtype
        gathered = [*routing]
        gathered.append(torch.ones(hidden_TH.shape[0], dtype=torch.bool, device=hidden_TH.device))
        if self._operators is not None and hidden_TH.shape[0]:
            hidden_TH, scale_T = self._operators.npu_dynamic_quant(hidden_TH)
            gathered.append(scale_T)
        elif self._operators is not None:
            gathered.append(hidden_TH.new_empty(0, dtype=torch.float32))
            hidden_TH = hidden_TH.to(torch.int8)
        source = _rank_slice(self._tp, hidden_TH.shape[0])
        token_counts: list[int] = []
        for group in self._groups:
            token_counts.append(hidden_TH.shape[0])
            hidden_TH, gathered = _gather(group, hidden_TH, gathered, length)
            length = None if length is None else length * group.size

        def finalize(out_TH: torch.Tensor) -> torch.Tensor:
            """Sum the outputs over all ranks and return the outputs of this rank's tokens."""
            for group, tokens in zip(reversed(self._groups), reversed(token_counts), strict=True):
                out_TH = group.reduce_scatter(out_TH)[:tokens]
            return self._tp.all_reduce(out_TH).to(dtype)

        scale_N = None if self._operators is None else gathered.pop()
        *routed, active_N = gathered
        return Prepared(hidden_TH, tuple(routed), finalize, source, active_N, scale_N)


Preparation = All2AllPreparation | AllGatherPreparation
"""Object that prepares a dispatcher's tokens. It keeps no state between calls."""
