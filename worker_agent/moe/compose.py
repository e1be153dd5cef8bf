"""The modular kernel of dispatcher and experts, and the parts of a layer put together: one path per dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from worker_agent.moe.dispatch import (
    SHARED_TOKEN_DISPATCHERS,
    BatchedDispatcher,
    Dispatched,
    DispatchRequest,
    MC2Variant,
    TokenDispatcher,
    build_dispatcher,
)
from worker_agent.moe.experts import (
    ActivationFormat,
    BatchedExperts,
    ExpertBatch,
    Experts,
    GroupedExperts,
    SlotwiseExperts,
    Workspaces,
)
from worker_agent.moe.operators import Operators
from worker_agent.moe.prepare import (
    All2AllPreparation,
    AllGatherPreparation,
    MC2Preparation,
    Preparation,
)
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shape import Activation
from worker_agent.moe.shared_experts import SharedRun
from worker_agent.moe.weights import ExpertWeights


@dataclass(frozen=True)
class KernelResult:
    """The outputs of a call."""

    out_TH: torch.Tensor
    heat_S: torch.Tensor
    """int64: real token choices that each local slot worked on."""

    beside_TH: torch.Tensor | None
    """The output of the shared experts, not yet added."""


class ModularKernel:
    """Dispatch -> experts -> combine, in workspaces that layers may share and chunks of at most ``chunk_rows`` rows.

    Raises ``ValueError`` where the activation formats of the two parts differ, where experts weigh and the dispatcher
    does not bring them weights, which are applied in one of the two places and never in both, where experts do not take
    weights of this kind, or ``chunk_rows`` is not positive.
    """

    def __init__(
        self,
        dispatcher: TokenDispatcher,
        experts: Experts,
        *,
        quantized: bool = False,
        workspaces: Workspaces | None = None,
        chunk_rows: int | None = None,
    ) -> None:
        if dispatcher.format is not experts.format:
            raise ValueError(
                f"{type(dispatcher).__name__} gives the {dispatcher.format.value} activation format, "
                f"{type(experts).__name__} takes the {experts.format.value} one"
            )
        if experts.weighs and not dispatcher.brings_weights:
            raise ValueError(
                f"{type(dispatcher).__name__} weighs in its combine; {type(experts).__name__} must not weigh"
            )
        if experts.quantized not in (None, quantized):
            kind = "int8" if quantized else "floating-point"
            raise ValueError(f"{type(experts).__name__} does not take {kind} weights")
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"{type(experts).__name__} takes no chunks of {chunk_rows} rows")
        self._dispatcher = dispatcher
        self._experts = experts
        self._quantized = quantized
        self._workspaces = Workspaces() if workspaces is None else workspaces
        self._chunk_rows = chunk_rows

    def run(
        self,
        requests: Sequence[DispatchRequest],
        weights: ExpertWeights,
        dtype: torch.dtype,
        *,
        beside: Sequence[SharedRun | None] = (),
        workspace_set: int = 0,
    ) -> list[KernelResult]:
        """Put this rank's tokens through all ranks' experts; every rank calls it at every step, tokens or not.

        Of two ``requests`` the tokens of one travel while the experts work on the other's. The order of exchanges is
        the same on all ranks: every dispatch, then every combine. Outputs are of ``dtype``, ``weights`` those of the
        local experts, and ``beside`` the shared experts of each request, computed while its tokens travel. Each request
        has workspaces of its own, from ``workspace_set`` on.
        """
        beside = beside or [None] * len(requests)
        travelling = deque(self.start_dispatch(request) for request in requests)
        for work in beside:
            if work is not None:
                work.during_dispatch()
        returning: list[Callable[[], torch.Tensor]] = []
        heat: list[torch.Tensor] = []
        for index in range(len(requests)):
            # What was sent, and the form in which it came, is not needed while the experts run.
            here = travelling.popleft()()
            heat.append(here.batch.heat_S)
            rows, combine = self.compute(here.batch, weights, dtype, workspace_set + index), here.combine
            # What has been worked on is not needed while outputs return, nor are they once they are on their way.
            del here
            returning.append(combine(rows))
            del rows
        beside_TH = [None if work is None else work.during_combine() for work in beside]
        return [
            KernelResult(receive(), heat_S, extra_TH)
            for receive, heat_S, extra_TH in zip(returning, heat, beside_TH, strict=True)
        ]

    def start_dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Send the tokens; return what waits for those that come here."""
        request = replace(request, quantized=self._quantized, experts_weigh=self._experts.weighs)
        return self._dispatcher.dispatch(request)

    def compute(
        self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, workspace_set: int
    ) -> torch.Tensor:
        """Return the experts' outputs, shaped as the batch; valid until the set's next ``compute``."""
        axis = 0 if batch.format is ActivationFormat.STANDARD else 1
        length = batch.rows.shape[axis]
        rows = length if self._chunk_rows is None else min(self._chunk_rows, length)
        if rows == length:
            return self._run_experts(batch, weights, dtype, workspace_set)
        out = self._workspaces.take(workspace_set, "output", batch.rows.shape, dtype, batch.rows.device)
        for part, chunk in batch.chunks(rows):
            out.narrow(axis, part.start, part.stop - part.start).copy_(
                self._run_experts(chunk, weights, dtype, workspace_set)
            )
        return out

    def _run_experts(
        self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, workspace_set: int
    ) -> torch.Tensor:
        hidden, inner = weights.w2_SHI.shape[1:]
        rows = batch.rows.shape[:-1].numel() if self._experts.needs_workspaces else 0
        wide, narrow = (
            self._workspaces.take(workspace_set, purpose, [rows * width], dtype, batch.rows.device)
            for purpose, width in (("wide", max(weights.w13_SIH.shape[1], hidden)), ("narrow", inner))
        )
        return self._experts.run(batch, weights, wide, narrow)


MOST_MC2_TOKENS = 512
"""Tokens of a rank that MC2's operators take on an NPU, as vLLM-Ascend has it; others are for larger steps."""


@dataclass(frozen=True)
class LayerOptions:
    """The parts of a layer, where they are not to be the default."""

    preparations: Mapping[str, Preparation] = field(default_factory=dict)
    """By dispatcher; by default as for ranks with tokens of their own: gathered, padded (MC2) or kept (all-to-all)."""

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
    """The split of an expert's tokens over its replicas: ``"tables"``, by ``log2phy``, or ``"step"``, in each step so
    that the hottest rank is as cool as can be (``stepwise``)."""

    split_rounds: int | None = None
    """Where tokens are split by step, the rounds that look for the split; more cost time. By default as many as a step
    of its size takes to come within a token of the best; where ranks do not know each other's numbers of tokens
    (all-to-all without ``length``), as many as one of 4,096 tokens with 8 choices."""

    def __post_init__(self) -> None:
        if self.split_rounds is not None and self.split_rounds < 1:
            raise ValueError(f"split_rounds is {self.split_rounds}; a split takes at least one round")
        if self.split not in ("tables", "step"):
            raise ValueError(f"split is {self.split!r}; use one of tables, step")
        if self.slotwise and self.max_rank_tokens is not None:
            raise ValueError("experts are either slotwise or batched (max_rank_tokens), not both")

    def completed(
        self, dispatchers: Sequence[str], quantized: bool, operators: Operators, device: torch.device
    ) -> LayerOptions:
        """Return the options with what operators and ``device`` offer, and workspaces, in place of ``None``.

        Raises ``ValueError`` where they do not fit a layer of these ``dispatchers``, of int8 weights if ``quantized``.
        """
        given = " and ".join(dispatchers)
        if not dispatchers:
            raise ValueError("a layer needs at least one dispatcher")
        unused = [name for name in self.preparations if name not in dispatchers]
        if unused:
            raise ValueError(f"preparations are given for {' and '.join(unused)}, dispatchers are {given}")
        if self.quantize_before_gather and not quantized:
            raise ValueError(
                "quantize_before_gather is for W8A8 layers; this one's weights are floating-point"
            )
        gathering = [name for name in dispatchers if name in SHARED_TOKEN_DISPATCHERS]
        if self.quantize_before_gather and all(name in self.preparations for name in gathering):
            own = " with preparations of their own" if gathering else ""
            raise ValueError(
                f"quantize_before_gather needs a dispatcher that gathers by a default preparation, got {given}{own}"
            )
        return replace(
            self,
            mc2=MC2Variant.of(operators, device) if self.mc2 is None else self.mc2,
            workspaces=Workspaces(sets=2) if self.workspaces is None else self.workspaces,
        )

    def check_choices(self, layer: int, topk_ids_TK: torch.Tensor) -> None:
        """Raise ``ValueError`` naming the layer where the options do not allow so many choices of a token."""
        choices = topk_ids_TK.shape[1]
        if self.weigh_on_input and choices != 1:
            raise ValueError(
                f"layer {layer}: weights can be applied to the input of one choice per token alone, got {choices}"
            )


@dataclass(frozen=True)
class LayerPath:
    """The parts that a step's tokens go through: one path for each dispatcher of a layer."""

    preparation: Preparation
    kernel: ModularKernel
    rooms: Mapping[str, int]
    """The tokens of one dispatch that there is room for, by what has no more."""
    shares_tokens: bool
    """All ranks dispatch the same tokens."""
    distinct_for: str | None = None
    """The part that needs the real choices of a token to be distinct experts, if any does."""

    @classmethod
    def of(
        cls,
        name: str,
        group: RankGroup,
        slots: int,
        operators: Operators,
        device: torch.device,
        quantized: bool,
        options: LayerOptions,
        activation: Activation = Activation.SILU,
    ) -> LayerPath:
        """Make the path of the dispatcher ``name``; ``ValueError`` where there is none, or parts do not fit together.

        Each rank of ``group`` has as many local experts as ``slots``, of int8 where ``quantized`` and with an
        ``activation`` between their two matrices; ``operators`` compute on ``device``. ``options`` are the layer's,
        ``completed``.
        """
        sender: TokenDispatcher = build_dispatcher(name, group, slots, operators, options.mc2)
        experts: Experts
        weighs, gathers, most = (
            options.experts_weigh,
            name in SHARED_TOKEN_DISPATCHERS,
            options.max_rank_tokens,
        )
        rooms, distinct_for = {}, "for MC2" if name == "mc2" else None
        if name == "mc2" and device.type == "npu":
            rooms["MC2"] = MOST_MC2_TOKENS
        if most is not None:
            sender = BatchedDispatcher(sender, group.size, slots, most)
            experts = BatchedExperts(weighs=weighs, activation=activation)
            # A gathered dispatch has the tokens of all ranks.
            rooms["the batched format"] = most * group.size if gathers else most
            distinct_for = "in the batched format"
        elif options.slotwise:
            experts = SlotwiseExperts(weighs=weighs, activation=activation)
        else:
            experts = GroupedExperts(operators, weighs=weighs, activation=activation)
        kernel = ModularKernel(
            sender,
            experts,
            quantized=quantized,
            workspaces=options.workspaces,
            chunk_rows=options.chunk_rows,
        )
        preparation, alone = options.preparations.get(name), RankGroup(None)
        if preparation is None and gathers:
            quantize_with = operators if options.quantize_before_gather else None
            preparation = AllGatherPreparation([group], quantize_with=quantize_with)
        elif preparation is None:
            preparation = MC2Preparation(group, alone) if name == "mc2" else All2AllPreparation(alone)
        return cls(preparation, kernel, rooms, gathers, distinct_for)

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
