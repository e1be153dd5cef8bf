"""Puts a layer's parts together: preparation, dispatcher, experts, kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_agent.moe.activation import Activation
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

SPLITS = ("tables", "step")
"""What ``LayerOptions.split`` can be."""

MOST_MC2_TOKENS = 512
"""What MC2's operators take of a rank on an NPU, as vLLM-Ascend has it; another dispatcher is for larger steps."""


@dataclass(frozen=True)
class LayerOptions:
    """What a layer is made of, where it is not to be the default."""

    preparations: Mapping[str, Preparation[Any]] = field(default_factory=dict)
    """By dispatcher; by default the one for ranks that have tokens of their own: see ``default_preparation``."""

    slotwise: bool = False
    """Plain torch in re-used workspaces instead of grouped operators; floating-point weights only."""

    max_rank_tokens: int | None = None
    """The batched format, with room for so many dispatched tokens of each rank; floating-point weights only."""

    experts_weigh: bool = False
    """Weights are applied by the experts instead of by combine; not with MC2."""

    weigh_on_input: bool = False
    """Tokens are multiplied by their weight before the experts instead of after; only for K = 1."""

    quantize_before_gather: bool = False
    """W8A8 layers quantize tokens before their dispatcher gathers them, so that less travels; with preparations of its
    own a layer says it there."""

    chunk_rows: int | None = None
    """At most so many rows go through the experts at a time."""

    workspaces: Workspaces | None = None
    """Memory shared with other layers, in two sets where steps have two micro-batches; by default the layer's own."""

    multistream: bool = False
    """Shared experts run on a stream of their own, where the device has streams."""

    mc2: MC2Variant | None = None
    """By default what operators and device offer."""

    split: str = "tables"
    """How an expert's tokens are split over its replicas: ``"tables"``, by ``log2phy``, or ``"step"``, in each step so
    that the hottest rank is as cool as can be (``stepwise``)."""

    split_rounds: int | None = None
    """Where tokens are split by step, the rounds that look for the split; more cost time. By default as many as a step
    of its size takes to come within a token of the best; where ranks do not know each other's numbers of tokens
    (all-to-all without ``length``), as many as one of 4,096 tokens with 8 choices."""

    def __post_init__(self) -> None:
        if self.split_rounds is not None and self.split_rounds < 1:
            raise ValueError(f"split_rounds is {self.split_rounds}; a split takes at least one round")
        if self.split not in SPLITS:
            raise ValueError(f"split is {self.split!r}; use one of {', '.join(SPLITS)}")
        if self.slotwise and self.max_rank_tokens is not None:
            raise ValueError("experts are either slotwise or batched (max_rank_tokens), not both")

    def check_choices(self, layer: int, topk_ids_TK: torch.Tensor) -> None:
        """Raise ``ValueError`` naming the layer where the options do not allow so many choices of a token."""
        choices = topk_ids_TK.shape[1]
        if self.weigh_on_input and choices != 1:
            raise ValueError(
                f"layer {layer}: weights can be applied to the input of one choice per token alone, got {choices}"
            )


@dataclass(frozen=True)
class LayerPath:
    """How a step's tokens go through a layer: one for each of its dispatchers."""

    preparation: Preparation[Any]
    kernel: ModularKernel
    rooms: Mapping[str, int]
    """The tokens of one dispatch that there is room for, by what has no more."""
    shares_tokens: bool
    """Whether all ranks dispatch the same tokens."""
    distinct_for: str | None = None
    """What needs the real choices of a token to be distinct experts, if anything does."""

    def check_room(self, layer: int, tokens: int) -> None:
        """Raise ``ValueError`` naming the layer where a rank dispatches more ``tokens``, padding among them."""
        for owner, room in self.rooms.items():
            if tokens > room:
                raise ValueError(
                    f"layer {layer}: {tokens} tokens, padding among them, are more than the {room} of a rank's "
                    f"dispatch that {owner} has room for"
                )

    def check_distinct(self, layer: int, topk_ids_TK: torch.Tensor) -> None:
        """Raise ``ValueError`` naming the layer where a token has an expert twice and must not; -1 is none."""
        if self.distinct_for is None:
            return
        sorted_TK = topk_ids_TK.sort(dim=1).values
        twice_T = ((sorted_TK.diff(dim=1) == 0) & (sorted_TK[:, 1:] >= 0)).any(dim=1)
        if twice_T.any():
            token = int(twice_T.nonzero()[0])
            raise ValueError(
                f"layer {layer}: topk_ids must have distinct experts for each token {self.distinct_for}, "
                f"got {topk_ids_TK[token].tolist()} at token {token}"
            )


def compose(
    dispatchers: Sequence[str],
    group: RankGroup,
    slots: int,
    operators: Operators,
    device: torch.device,
    quantized: bool,
    options: LayerOptions,
    activation: Activation = Activation.SILU,
) -> dict[str, LayerPath]:
    """The path of each dispatcher by name; ``ValueError`` where there is none, or parts do not fit together.

    Parameters
    ----------
    dispatchers
        Their names.
    group, slots
        The ranks, and the local experts of each.
    operators, device
        What computes, and where.
    quantized
        Whether experts are W8A8.
    options
        Of the layer.
    activation
        Between the experts' two matrices.
    """
    if not dispatchers:
        raise ValueError("a layer needs at least one dispatcher")
    unused = [name for name in options.preparations if name not in dispatchers]
    if unused:
        raise ValueError(
            f"preparations are given for {' and '.join(unused)}, dispatchers are {' and '.join(dispatchers)}"
        )
    mc2 = MC2Variant.of(operators, device) if options.mc2 is None else options.mc2
    workspaces = Workspaces(sets=2) if options.workspaces is None else options.workspaces
    _check_quantized_gather(dispatchers, quantized, options)
    quantize_with = operators if options.quantize_before_gather else None
    paths = {}
    for name in dispatchers:
        sender: TokenDispatcher[Any] = build_dispatcher(name, group, slots, operators, mc2)
        if options.max_rank_tokens is not None:
            sender = batched(sender, group.size, slots, options.max_rank_tokens)
        kernel = ModularKernel(
            sender,
            _experts(operators, options, activation),
            quantized=quantized,
            workspaces=workspaces,
            chunk_rows=options.chunk_rows,
        )
        preparation = options.preparations.get(name) or default_preparation(name, group, quantize_with)
        paths[name] = LayerPath(
            preparation,
            kernel,
            _rooms(name, group, device, options),
            name in SHARED_TOKEN_DISPATCHERS,
            _distinct_for(name, options),
        )
    return paths


def _rooms(name: str, group: RankGroup, device: torch.device, options: LayerOptions) -> dict[str, int]:
    """The tokens that one dispatch has room for, by what has no more."""
    rooms = {}
    if name == "mc2" and device.type == "npu":
        rooms["MC2"] = MOST_MC2_TOKENS
    if options.max_rank_tokens is not None:
        # A gathered dispatch has the tokens of all ranks.
        gathered = group.size if name in SHARED_TOKEN_DISPATCHERS else 1
        rooms["the batched format"] = options.max_rank_tokens * gathered
    return rooms


def _distinct_for(name: str, options: LayerOptions) -> str | None:
    if options.max_rank_tokens is not None:
        return "in the batched format"
    return "for MC2" if name == "mc2" else None


def _check_quantized_gather(dispatchers: Sequence[str], quantized: bool, options: LayerOptions) -> None:
    """Raise ``ValueError`` where tokens are to be quantized before a gather, and nothing would do so."""
    if not options.quantize_before_gather:
        return
    if not quantized:
        raise ValueError("quantize_before_gather is for W8A8 layers; this one's weights are floating-point")
    gathering = [name for name in dispatchers if name in SHARED_TOKEN_DISPATCHERS]
    if not any(name not in options.preparations for name in gathering):
        raise ValueError(
            "quantize_before_gather needs a dispatcher that gathers by a default preparation, "
            f"got {' and '.join(dispatchers)}" + (" with preparations of their own" if gathering else "")
        )


def _experts(operators: Operators, options: LayerOptions, activation: Activation) -> ExpertsPart:
    if options.max_rank_tokens is not None:
        return BatchedExperts(weighs=options.experts_weigh, activation=activation)
    if options.slotwise:
        return SlotwiseExperts(weighs=options.experts_weigh, activation=activation)
    return GroupedExperts(operators, weighs=options.experts_weigh, activation=activation)


def default_preparation(
    dispatcher: str, group: RankGroup, quantize_with: Operators | None = None
) -> Preparation[Any]:
    """Shared-token dispatchers gather, MC2 pads, All2AllV takes tokens as they come."""
    alone = RankGroup(None)
    if dispatcher in SHARED_TOKEN_DISPATCHERS:
        return SequenceParallelPreparation(group, quantize_with)
    return MC2Preparation(group, alone) if dispatcher == "mc2" else All2AllPreparation(alone)
