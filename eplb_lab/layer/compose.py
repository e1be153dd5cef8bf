"""Assemble a layer from a kernel that combines dispatcher and experts, layer options, and one path per dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from eplb_lab.layer.dispatch import (
    DISPATCHER_NAMES,
    DISPATCHERS,
    SHARED_TOKEN_DISPATCHERS,
    BatchedDispatcher,
    DispatchRequest,
    MC2Dispatcher,
    MC2Limits,
    MC2Variant,
    TokenDispatcher,
)
from eplb_lab.layer.experts import BatchedExperts, Experts
from eplb_lab.layer.operators import Operators
from eplb_lab.layer.prepare import (
    All2AllPreparation,
    AllGatherPreparation,
    MC2Preparation,
    Preparation,
)
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.shape import MoEShape
from eplb_lab.layer.weights import ExpertWeights


class ModularKernel:
    """Runs dispatch, experts and combine.

    Raises ``ValueError`` if the dispatcher and the experts use different activation formats.
    """

    def __init__(self, dispatcher: TokenDispatcher, experts: Experts) -> None:
        if dispatcher.format is not experts.format:
            raise ValueError(
                f"{type(dispatcher).__name__} returns rows in the {dispatcher.format.value} activation format, but "
                f"{type(experts).__name__} requires the {experts.format.value} format"
            )
        self._dispatcher = dispatcher
        self._experts = experts

    def run(
        self,
        requests: Sequence[DispatchRequest],
        weights: ExpertWeights,
        dtype: torch.dtype,
        shared: Sequence[Callable[[], Callable[[], torch.Tensor]]] = (),
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """Run this rank's tokens through the experts of all ranks.

        Every rank calls this in every step, even if it has no tokens. With two requests, the tokens of one are in
        transit while the experts compute the other. All ranks perform their exchanges in the same order: all
        dispatches, then all combines.

        Parameters
        ----------
        requests
            One or two requests.
        weights
            Weights of the local experts.
        dtype
            Data type of the outputs.
        shared
            Functions that start shared experts, called while tokens are in transit. Each returns a function that
            finishes the shared experts, which is called while outputs are in transit.

        Returns
        -------
        outputs : list of torch.Tensor
            Outputs of each request.
        heat_S : torch.Tensor
            Number of real token choices dispatched to each local slot, int64.
        shared_outputs : list of torch.Tensor
            Outputs of the shared experts, which are not included in ``outputs``.
        """
        dispatches = deque(self._dispatcher.dispatch(request) for request in requests)
        shared_finishes = [start() for start in shared]
        combines: list[Callable[[], torch.Tensor]] = []
        heat: list[torch.Tensor] = []
        while dispatches:
            # Removing the dispatch from the queue releases its send and receive buffers before the experts run.
            arrival = dispatches.popleft()()
            heat.append(arrival.batch.heat_S)
            rows = self._experts.apply(arrival.batch, weights, dtype)
            combine = arrival.combine
            # Release the batch before its outputs are sent, and the outputs as soon as they have been sent.
            del arrival
            combines.append(combine(rows))
            del rows
        shared_outputs = [finish() for finish in shared_finishes]
        return [receive() for receive in combines], torch.stack(heat).sum(dim=0), shared_outputs


@dataclass(frozen=True)
class LayerOptions:
    """Options that change the parts of a layer."""

    tp_group: RankGroup | None = None
    """Tensor-parallel ranks. They receive the same tokens, and each dispatches a share of them."""

    dp_groups: Sequence[RankGroup] = ()
    """Groups over which all-gather and MoGE gather tokens, in this order; by default one group of all ranks.

    The data-parallel group comes first, then the prefill-context-parallel group.
    """

    max_rank_tokens: int | None = None
    """Maximum number of tokens that a rank dispatches. If set, experts use the batched format, without quantisation."""

    weigh_on_input: bool = False
    """Apply the router weights to the experts' inputs instead of to their outputs. Requires K = 1."""

    quantize_before_gather: bool = False
    """Quantise tokens before they are gathered, so that fewer bytes are sent. Requires a W8A8 layer."""

    mc2: MC2Variant | None = None
    """Variant of MC2's operators; defaults to the variant for the machine."""

    split: str = "tables"
    """Method of splitting an expert's tokens over its replicas.

    ``"tables"`` uses ``log2phy``. ``"step"`` computes, in each step, a split that minimises the hottest rank's load
    (see ``stepwise``).
    """

    def check(self, dispatchers: Sequence[str], quantization: str) -> None:
        """Raise ``ValueError`` if the options are incompatible with the layer's ``dispatchers`` or ``quantization``."""
        quantized = quantization != "none"
        names = " and ".join(dispatchers)
        gathers = any(name in SHARED_TOKEN_DISPATCHERS for name in dispatchers)
        batched = self.max_rank_tokens is not None
        problems = {
            "a layer needs at least one dispatcher": not dispatchers,
            f"split must be 'tables' or 'step', got {self.split!r}": self.split not in ("tables", "step"),
            "quantize_before_gather requires a W8A8 layer, but this layer's weights are floating-point": (
                self.quantize_before_gather and not quantized
            ),
            f"quantize_before_gather requires a dispatcher that gathers, got {names}": (
                self.quantize_before_gather and not gathers
            ),
            "the batched format (max_rank_tokens) requires floating-point weights": batched and quantized,
            f"max_rank_tokens must be at least 1, got {self.max_rank_tokens}": (
                batched and not self.max_rank_tokens
            ),
        }
        for problem, exists in problems.items():
            if exists:
                raise ValueError(problem)


class LayerGroups(NamedTuple):
    """Groups of the ranks over which a layer is distributed."""

    ep: RankGroup
    """Expert-parallel group."""
    mc2: RankGroup
    """Group of the same ranks for MC2's communication."""

    @classmethod
    def of(
        cls, ep: dist.ProcessGroup | RankGroup | None, mc2: dist.ProcessGroup | RankGroup | None
    ) -> LayerGroups:
        """Wrap a layer's process groups. If ``mc2`` is ``None``, MC2 communicates over ``ep``."""
        group = RankGroup.of(ep)
        return cls(group, group if mc2 is None else RankGroup.of(mc2))


@dataclass(frozen=True)
class LayerPath:
    """One path through a layer: the parts that process a step's tokens with one dispatcher."""

    preparation: Preparation
    kernel: ModularKernel
    shares_tokens: bool
    """True if all ranks dispatch the same tokens."""

    room: int | None = None
    """Maximum number of tokens in one batched dispatch, including padding, or ``None`` if there is no limit."""

    distinct_for: str | None = None
    """Name of the part that requires a token's real choices to be distinct experts, or ``None`` if no part does."""

    limits: MC2Limits | None = None
    """Limits of MC2's operators, or ``None`` if they are not enforced."""

    @classmethod
    def of(
        cls,
        name: str,
        shape: MoEShape,
        groups: LayerGroups,
        slots: int,
        operators: Operators,
        device: torch.device,
        options: LayerOptions,
        experts: Experts,
    ) -> LayerPath:
        """Build the path of one dispatcher.

        Parameters
        ----------
        name
            Name of the dispatcher.
        shape
            Dimensions of the layer.
        groups
            Ranks of the layer.
        slots
            Number of slots per rank.
        operators
            Operators for ``device``.
        device
            Device of the layer.
        options
            Validated options of the layer.
        experts
            Experts for the standard format.

        Raises
        ------
        ValueError
            If there is no such dispatcher, if the groups are inconsistent, or if the layer exceeds MC2's limits.
        """
        group = groups.ep
        variant = (MC2Variant.of(device) if options.mc2 is None else options.mc2).on(device)
        sender: TokenDispatcher
        if name == "mc2":
            sender = MC2Dispatcher(group, slots, operators, variant, groups.mc2)
        elif name in DISPATCHERS:
            sender = DISPATCHERS[name](group, slots, operators)
        else:
            raise ValueError(f"unknown dispatcher {name!r}; use one of {', '.join(DISPATCHER_NAMES)}")
        gathers = name in SHARED_TOKEN_DISPATCHERS
        room = None
        limits = None
        distinct_for = None
        if name == "mc2":
            limits = _mc2_limits(shape, groups, slots, variant)
            distinct_for = "MC2"
        if options.max_rank_tokens is not None:
            sender = BatchedDispatcher(sender, group.size, slots, options.max_rank_tokens)
            experts = BatchedExperts(shape.activation)
            # After a gather, a dispatch contains the tokens of all ranks.
            room = options.max_rank_tokens * (group.size if gathers else 1)
            distinct_for = "the batched format"
        preparation = _preparation(name, shape.layer, group, operators, options)
        return cls(preparation, ModularKernel(sender, experts), gathers, room, distinct_for, limits)

    def check_room(self, layer: int, tokens: int, choices: int) -> None:
        """Raise ``ValueError`` if a rank dispatches too many tokens or too many choices per token.

        Padding counts as tokens.
        """
        if self.limits is not None:
            self.limits.check_step(tokens, choices)
        if self.room is not None and tokens > self.room:
            raise ValueError(
                f"layer {layer}: a rank dispatches {tokens} tokens, including padding, but {self.distinct_for} "
                f"has room for {self.room}; increase max_rank_tokens"
            )

    def check_distinct(self, layer: int, topk_ids_TK: torch.Tensor) -> None:
        """Raise ``ValueError`` if a token chooses an expert twice and the path does not allow that.

        Padding choices (-1) may repeat.
        """
        if self.distinct_for is None:
            return
        sorted_TK = topk_ids_TK.sort(dim=1).values
        repeats_T = ((sorted_TK.diff(dim=1) == 0) & (sorted_TK[:, 1:] >= 0)).any(dim=1)
        if repeats_T.any():
            token = int(repeats_T.nonzero()[0])
            raise ValueError(
                f"layer {layer}: {self.distinct_for} requires distinct experts for each token in topk_ids, "
                f"got {topk_ids_TK[token].tolist()} at token {token}"
            )


def _preparation(
    name: str, layer: int, group: RankGroup, operators: Operators, options: LayerOptions
) -> Preparation:
    """Return the preparation for the dispatcher ``name``.

    Raises ``ValueError`` if the groups that it gathers over do not cover every rank exactly once.
    """
    tp = RankGroup(None) if options.tp_group is None else options.tp_group
    if name == "mc2":
        return MC2Preparation(group, tp)
    if name not in SHARED_TOKEN_DISPATCHERS:
        return All2AllPreparation(tp)
    groups = options.dp_groups or [group]
    sizes = [member.size for member in (*groups, tp)]
    if prod(sizes) != group.size:
        raise ValueError(
            f"layer {layer}: {name} gathers the tokens of {group.size} ranks, but dp_groups and tp_group have "
            f"{' x '.join(map(str, sizes))} ranks; together, these groups must cover every rank exactly once"
        )
    return AllGatherPreparation(groups, tp, operators if options.quantize_before_gather else None)


def _mc2_limits(shape: MoEShape, groups: LayerGroups, slots: int, variant: MC2Variant) -> MC2Limits | None:
    """Return the limits of MC2's operators, or ``None`` if they are not enforced.

    Raises ``ValueError`` if the two groups have different ranks, or if MC2 needs a separate group and has none.
    """
    group, mc2_group = groups
    if (mc2_group.rank, mc2_group.size) != (group.rank, group.size):
        raise ValueError(
            f"layer {shape.layer}: mc2_group must have the same ranks as ep_group, but this is rank {group.rank} of "
            f"{group.size} in ep_group, and rank {mc2_group.rank} of {mc2_group.size} in mc2_group"
        )
    if variant.buffer_megabytes is None:
        return None
    if mc2_group.name == group.name:
        raise ValueError(
            f"layer {shape.layer}: MC2 needs a process group that nothing else uses; pass a separate group of the same "
            "ranks as mc2_group"
        )
    return MC2Limits(shape.layer, variant.width(shape.hidden), group.size, slots, variant)
