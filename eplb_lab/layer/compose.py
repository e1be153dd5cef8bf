"""The modular kernel of dispatcher and experts, and the parts of a layer put together: one path per dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

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
    """Dispatch -> experts -> combine; ``ValueError`` where the activation formats of the two parts differ."""

    def __init__(self, dispatcher: TokenDispatcher, experts: Experts) -> None:
        if dispatcher.format is not experts.format:
            raise ValueError(
                f"{type(dispatcher).__name__} gives the {dispatcher.format.value} activation format, "
                f"{type(experts).__name__} takes the {experts.format.value} one"
            )
        self._dispatcher = dispatcher
        self._experts = experts

    def run(
        self,
        requests: Sequence[DispatchRequest],
        weights: ExpertWeights,
        dtype: torch.dtype,
        beside: Sequence[Callable[[], Callable[[], torch.Tensor]]] = (),
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """Put this rank's tokens through all ranks' experts; every rank calls it at every step, tokens or not.

        Of two ``requests`` the tokens of one travel while the experts work on the other's. The order of exchanges is
        the same on all ranks: every dispatch, then every combine. Outputs are of ``dtype``, ``weights`` those of the
        local experts, and each of ``beside`` starts shared experts while tokens travel and returns what finishes them
        while outputs return.

        Returns each request's outputs; the real token choices that each local slot worked on, int64 ``[S]``; and the
        outputs of the shared experts, not yet added.
        """
        travelling = deque(self._dispatcher.dispatch(request) for request in requests)
        begun = [start() for start in beside]
        returning: list[Callable[[], torch.Tensor]] = []
        heat: list[torch.Tensor] = []
        while travelling:
            # What was sent, and the form in which it came, is not needed while the experts run.
            here = travelling.popleft()()
            heat.append(here.batch.heat_S)
            rows, combine = self._experts.apply(here.batch, weights, dtype), here.combine
            # What has been worked on is not needed while outputs return, nor are they once they are on their way.
            del here
            returning.append(combine(rows))
            del rows
        beside_TH = [finish() for finish in begun]
        return [receive() for receive in returning], torch.stack(heat).sum(dim=0), beside_TH


@dataclass(frozen=True)
class LayerOptions:
    """The parts of a layer, where they are not to be the default."""

    tp_group: RankGroup | None = None
    """Tensor-parallel ranks: they pass the same tokens, of which each dispatches a part."""

    dp_groups: Sequence[RankGroup] = ()
    """Over which all-gather and MoGE gather, one after the other: data-parallel ranks, then those of prefill context
    parallelism. By default all ranks."""

    max_rank_tokens: int | None = None
    """The batched format, with room for so many dispatched tokens of each rank; floating-point weights only."""

    weigh_on_input: bool = False
    """Tokens are multiplied by their weight before the experts instead of after; only for K = 1."""

    quantize_before_gather: bool = False
    """W8A8 layers quantize tokens before their dispatcher gathers them, so that less travels."""

    mc2: MC2Variant | None = None
    """By default what the machine offers."""

    split: str = "tables"
    """The split of an expert's tokens over its replicas: ``"tables"``, by ``log2phy``, or ``"step"``, in each step so
    that the hottest rank is as cool as can be (``stepwise``)."""

    def check(self, dispatchers: Sequence[str], quantization: str) -> None:
        """Raise ``ValueError`` where the options do not fit a layer of these ``dispatchers`` and ``quantization``."""
        quantized = quantization != "none"
        given = " and ".join(dispatchers)
        gathers = any(name in SHARED_TOKEN_DISPATCHERS for name in dispatchers)
        batched = self.max_rank_tokens is not None
        problems = {
            "a layer needs at least one dispatcher": not dispatchers,
            f"split is {self.split!r}; use one of tables, step": self.split not in ("tables", "step"),
            "quantize_before_gather is for W8A8 layers; this one's weights are floating-point": (
                self.quantize_before_gather and not quantized
            ),
            f"quantize_before_gather needs a dispatcher that gathers, got {given}": (
                self.quantize_before_gather and not gathers
            ),
            "the batched format (max_rank_tokens) takes floating-point weights alone": batched and quantized,
            f"the batched format needs room for one token per rank, got {self.max_rank_tokens}": (
                batched and not self.max_rank_tokens
            ),
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(problem)


@dataclass(frozen=True)
class LayerPath:
    """The parts that a step's tokens go through: one path for each dispatcher of a layer."""

    preparation: Preparation
    kernel: ModularKernel
    shares_tokens: bool
    """All ranks dispatch the same tokens."""

    room: int | None = None
    """The most tokens of one batched dispatch, padding among them, if there is a bound."""

    distinct_for: str | None = None
    """The part that needs the real choices of a token to be distinct experts, and has the bound, if any does."""

    limits: MC2Limits | None = None
    """Of MC2's operators, where they are a machine's."""

    @classmethod
    def of(
        cls,
        name: str,
        shape: MoEShape,
        group: RankGroup,
        mc2_group: RankGroup,
        slots: int,
        operators: Operators,
        device: torch.device,
        options: LayerOptions,
        experts: Experts,
    ) -> LayerPath:
        """Make the path of the dispatcher ``name``; ``ValueError`` where there is none, or its limits are passed.

        Each rank of ``group`` has as many local experts of the layer of this ``shape`` as ``slots``; MC2 talks in
        ``mc2_group``. ``operators`` compute on ``device``, and ``experts`` in the standard format. ``options`` are the
        layer's, checked.
        """
        variant = (MC2Variant.of(device) if options.mc2 is None else options.mc2).on(device)
        sender: TokenDispatcher
        if name == "mc2":
            sender = MC2Dispatcher(group, slots, operators, variant, mc2_group)
        elif name in DISPATCHERS:
            sender = DISPATCHERS[name](group, slots, operators)
        else:
            raise ValueError(f"unknown dispatcher {name!r}; use one of {', '.join(DISPATCHER_NAMES)}")
        gathers, room, limits, distinct_for = name in SHARED_TOKEN_DISPATCHERS, None, None, None
        if name == "mc2":
            limits, distinct_for = _mc2_limits(shape, group, mc2_group, slots, variant), "MC2"
        if options.max_rank_tokens is not None:
            sender = BatchedDispatcher(sender, group.size, slots, options.max_rank_tokens)
            experts = BatchedExperts(shape.activation)
            # A gathered dispatch has the tokens of all ranks.
            room = options.max_rank_tokens * (group.size if gathers else 1)
            distinct_for = "the batched format"
        preparation = _preparation(name, shape.layer, group, operators, options)
        return cls(preparation, ModularKernel(sender, experts), gathers, room, distinct_for, limits)

    def check_room(self, layer: int, tokens: int, choices: int) -> None:
        """Raise ``ValueError`` naming the layer where a rank dispatches more ``tokens``, padding among them.

        Or more ``choices`` per token.
        """
        if self.limits is not None:
            self.limits.check_step(tokens, choices)
        if self.room is not None and tokens > self.room:
            raise ValueError(
                f"layer {layer}: {tokens} tokens, padding among them, are more than the {self.room} of a rank's "
                f"dispatch that {self.distinct_for} has room for"
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
                f"layer {layer}: topk_ids must have distinct experts for each token for {self.distinct_for}, "
                f"got {topk_ids_TK[token].tolist()} at token {token}"
            )


def _preparation(
    name: str, layer: int, group: RankGroup, operators: Operators, options: LayerOptions
) -> Preparation:
    """Return what gives the dispatcher ``name`` its tokens; ``ValueError`` where groups leave out some ranks."""
    tp = RankGroup(None) if options.tp_group is None else options.tp_group
    if name == "mc2":
        return MC2Preparation(group, tp)
    if name not in SHARED_TOKEN_DISPATCHERS:
        return All2AllPreparation(tp)
    groups = options.dp_groups or [group]
    sizes = [each.size for each in (*groups, tp)]
    if prod(sizes) != group.size:
        raise ValueError(
            f"layer {layer}: {name} gathers the tokens of {group.size} ranks; groups of {' x '.join(map(str, sizes))} "
            "(dp_groups, then tp_group) leave some out, or have some twice"
        )
    return AllGatherPreparation(groups, tp, operators if options.quantize_before_gather else None)


def _mc2_limits(
    shape: MoEShape, group: RankGroup, mc2_group: RankGroup, slots: int, variant: MC2Variant
) -> MC2Limits | None:
    """Return the limits of MC2's operators, if the machine has any; ``ValueError`` where its group does not fit."""
    if (mc2_group.rank, mc2_group.size) != (group.rank, group.size):
        raise ValueError(
            f"layer {shape.layer}: mc2_group must have the ranks of ep_group, where this one is {group.rank} of "
            f"{group.size}, got {mc2_group.rank} of {mc2_group.size}"
        )
    if variant.buffer_megabytes is None:
        return None
    if mc2_group.name == group.name:
        raise ValueError(
            f"layer {shape.layer}: MC2 needs a process group that nothing else uses; give the layers one of the same "
            "ranks as mc2_group"
        )
    return MC2Limits(shape.layer, variant.width(shape.hidden), group.size, slots, variant)
