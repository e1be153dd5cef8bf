"""Puts a layer's parts together: preparation, dispatcher, experts, kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worker_agent.moe.dispatch import SHARED_TOKEN_DISPATCHERS, MC2Variant, build_dispatcher
from worker_agent.moe.dispatch.batched import batched
from worker_agent.moe.dispatch.interface import TokenDispatcher
from worker_agent.moe.experts import BatchedExperts, ExpertsPart, GroupedExperts, SlotwiseExperts, Workspaces
from worker_agent.moe.kernel import ModularKernel
from worker_agent.moe.operators import Operators
from worker_agent.moe.prepare import (
    All2AllPreparation,
    MC2Preparation,
    Preparation,
    SequenceParallelPreparation,
)
from worker_agent.moe.rank_group import RankGroup


@dataclass(frozen=True)
class LayerOptions:
    """What a layer is made of, where it is not to be the default."""

    preparation: Preparation[Any] | None = None
    """By default the one for ranks that have tokens of their own: see ``default_preparation``."""

    slotwise: bool = False
    """Plain torch in re-used workspaces instead of grouped operators; floating-point weights only."""

    max_rank_tokens: int | None = None
    """The batched format, with room for so many tokens of each rank; floating-point weights only."""

    experts_weigh: bool = False
    """Weights are applied by the experts instead of by combine; not with MC2."""

    weigh_on_input: bool = False
    """Tokens are multiplied by their weight before the experts instead of after; only for K = 1."""

    quantize_before_gather: bool = False
    """W8A8 layers whose dispatcher gathers tokens quantize them before, so that less travels."""

    chunk_rows: int | None = None
    """At most so many rows go through the experts at a time."""

    workspaces: Workspaces | None = None
    """Memory shared with other layers."""

    mc2: MC2Variant | None = None
    """By default what operators and device offer."""

    def check_call(self, layer: int, topk_ids_TK: torch.Tensor, check_values: bool) -> None:
        """Raise ``ValueError`` naming the layer where the parts do not take a call's tokens.

        Only ``check_values`` looks at ids, of which no token may have one twice in the batched format.
        """
        tokens, choices = topk_ids_TK.shape
        if self.weigh_on_input and choices != 1:
            raise ValueError(
                f"layer {layer}: weights can be applied to the input of one choice per token alone, got {choices}"
            )
        if self.max_rank_tokens is None:
            return
        if tokens > self.max_rank_tokens:
            raise ValueError(
                f"layer {layer}: {tokens} tokens are more than the {self.max_rank_tokens} of a rank that the batched "
                "format has room for"
            )
        if check_values and choices > 1:
            twice_T = (topk_ids_TK.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)
            if twice_T.any():
                token = int(twice_T.nonzero()[0])
                raise ValueError(
                    f"layer {layer}: topk_ids must have distinct experts for each token in the batched format, "
                    f"got {topk_ids_TK[token].tolist()} at token {token}"
                )


@dataclass(frozen=True)
class Composed:
    """A layer's working parts."""

    preparation: Preparation[Any]
    kernel: ModularKernel


def compose(
    dispatcher: str,
    group: RankGroup,
    slots: int,
    operators: Operators,
    device: torch.device,
    quantized: bool,
    options: LayerOptions,
) -> Composed:
    """Build the parts; ``ValueError`` where they do not fit together."""
    mc2 = MC2Variant.of(operators, device) if options.mc2 is None else options.mc2
    sender: TokenDispatcher[Any] = build_dispatcher(dispatcher, group, slots, operators, mc2)
    if options.max_rank_tokens is not None:
        sender = batched(sender, group.size, slots, options.max_rank_tokens)
    kernel = ModularKernel(
        sender,
        _experts(operators, options),
        quantized=quantized,
        workspaces=options.workspaces,
        chunk_rows=options.chunk_rows,
    )
    preparation = options.preparation
    if preparation is None:
        quantize_with = operators if quantized and options.quantize_before_gather else None
        preparation = default_preparation(dispatcher, group, quantize_with)
    return Composed(preparation, kernel)


def _experts(operators: Operators, options: LayerOptions) -> ExpertsPart:
    if options.max_rank_tokens is not None:
        return BatchedExperts(weighs=options.experts_weigh)
    if options.slotwise:
        return SlotwiseExperts(weighs=options.experts_weigh)
    return GroupedExperts(operators, weighs=options.experts_weigh)


def default_preparation(
    dispatcher: str, group: RankGroup, quantize_with: Operators | None = None
) -> Preparation[Any]:
    """Shared-token dispatchers gather, MC2 pads, All2AllV takes tokens as they come."""
    alone = RankGroup(None)
    if dispatcher in SHARED_TOKEN_DISPATCHERS:
        return SequenceParallelPreparation(group, quantize_with)
    return MC2Preparation(group, alone) if dispatcher == "mc2" else All2AllPreparation(alone)
