"""The modular kernel: composes a dispatcher and experts, and lets other work run while tokens travel."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from worker_agent.moe.dispatch import Dispatched, DispatchRequest, InFlight, TokenDispatcher
from worker_agent.moe.dispatch.interface import started_combine, started_dispatch
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch, chunks
from worker_agent.moe.experts import ExpertsPart, Purpose, Scratch, Workspaces
from worker_agent.moe.weights import ExpertWeights


class WorkBeside(Protocol):
    """What can be done while tokens travel: a call's shared experts, in two parts."""

    def during_dispatch(self) -> None:
        """Part 1."""
        ...

    def during_combine(self) -> torch.Tensor:
        """Part 2, and its result ``[T, H]``."""
        ...


@dataclass(frozen=True)
class KernelResult:
    """What a call gives back."""

    out_TH: torch.Tensor
    heat_S: torch.Tensor
    """int64: real token choices that each local slot worked on."""

    beside_TH: torch.Tensor | None
    """What was computed beside, not yet added."""


class ModularKernel:
    """Dispatch -> experts -> combine.

    Parameters
    ----------
    dispatcher, experts
        The two parts. Raises ``ValueError`` where their activation formats differ, or where experts weigh and the
        dispatcher does not bring them weights. Weights are applied in one of the two places, never in both.
    quantized
        Whether weights are int8. Raises ``ValueError`` where the experts do not take them.
    workspaces
        Shared with other layers; by default the kernel's own.
    chunk_rows
        At most so many rows go through the experts at a time, in the batched format of each slot; ``None`` is all.
        Raises ``ValueError`` where it is not positive, or the experts take no parts.
    """

    def __init__(
        self,
        dispatcher: TokenDispatcher[Any],
        experts: ExpertsPart,
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
        if chunk_rows is not None and (chunk_rows < 1 or not experts.chunks):
            raise ValueError(f"{type(experts).__name__} takes no chunks of {chunk_rows} rows")
        self._dispatcher = dispatcher
        self._experts = experts
        self._quantized = quantized
        self._workspaces = Workspaces() if workspaces is None else workspaces
        self._chunk_rows = chunk_rows

    def run(
        self,
        request: DispatchRequest,
        weights: ExpertWeights,
        dtype: torch.dtype,
        *,
        beside: WorkBeside | None = None,
        workspace_set: int = 0,
    ) -> KernelResult:
        """This rank's tokens through all ranks' experts; every rank calls it at every step, with or without tokens.

        Parameters
        ----------
        request
            This rank's tokens and their choices.
        weights
            Of its experts.
        dtype
            Of the outputs.
        beside
            What is computed while tokens travel.
        workspace_set
            Which of the workspaces is used.
        """
        travelling = self.start_dispatch(request)
        if beside is not None:
            beside.during_dispatch()
        dispatched = travelling.receive()
        # What was sent, and the form in which it came, is not needed while the experts run.
        del travelling
        heat_S, metadata = dispatched.batch.heat_S, dispatched.metadata
        rows = self.compute(dispatched.batch, weights, dtype, workspace_set)
        # What has been worked on is not needed while the outputs return, nor are they once they are on their way.
        del dispatched
        returning = self.start_combine(rows, metadata)
        del rows
        beside_TH = None if beside is None else beside.during_combine()
        return KernelResult(returning.receive(), heat_S, beside_TH)

    def start_dispatch(self, request: DispatchRequest) -> InFlight[Dispatched[Any]]:
        """Send the tokens, without waiting for them where the dispatcher can."""
        request = replace(request, quantized=self._quantized, experts_weigh=self._experts.weighs)
        return started_dispatch(self._dispatcher, request)

    def compute(
        self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, workspace_set: int
    ) -> torch.Tensor:
        """The experts' outputs, shaped as the batch; valid until the set's next ``compute``."""
        axis = 0 if batch.format is ActivationFormat.STANDARD else 1
        length = batch.rows.shape[axis]
        rows = length if self._chunk_rows is None else min(self._chunk_rows, length)
        if rows == length:
            return self._experts.run(batch, weights, self._scratch(batch, weights, dtype, workspace_set))
        device = batch.rows.device
        out = self._workspaces.take(workspace_set, Purpose.OUTPUT, batch.rows.shape, dtype, device)
        for part, chunk in chunks(batch, rows):
            scratch = self._scratch(chunk, weights, dtype, workspace_set)
            out.narrow(axis, part.start, part.stop - part.start).copy_(
                self._experts.run(chunk, weights, scratch)
            )
        return out

    def start_combine(self, rows: torch.Tensor, metadata: Any) -> InFlight[torch.Tensor]:
        """Send the outputs back, without waiting for them where the dispatcher can; ``metadata`` is its own."""
        return started_combine(self._dispatcher, rows, metadata)

    def _scratch(
        self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, workspace_set: int
    ) -> Scratch:
        hidden, inner = weights.w2_SHI.shape[1:]
        first = weights.w13_SIH.shape[1]
        rows = batch.rows.shape[:-1].numel() if self._experts.needs_scratch else 0
        device = batch.rows.device

        def take(purpose: Purpose, width: int) -> torch.Tensor:
            return self._workspaces.take(workspace_set, purpose, [rows * width], dtype, device)

        return Scratch(take(Purpose.WIDE, max(first, hidden)), take(Purpose.NARROW, inner))


def run_two(
    kernel: ModularKernel,
    requests: tuple[DispatchRequest, DispatchRequest],
    weights: ExpertWeights,
    dtype: torch.dtype,
    *,
    beside: tuple[WorkBeside | None, WorkBeside | None] = (None, None),
) -> tuple[KernelResult, KernelResult]:
    """Two requests through one kernel: while the tokens of one travel, the experts work on the other's.

    Each result is as ``run`` would give it. The order of exchanges is the same on all ranks: dispatch, dispatch,
    combine, combine.

    Parameters
    ----------
    kernel
        Its workspaces must have two sets.
    requests
        The two.
    weights, dtype
        Of the local experts, and what they compute in.
    beside
        What each request has done while its tokens travel.
    """
    travelling = deque(kernel.start_dispatch(request) for request in requests)
    for work in beside:
        if work is not None:
            work.during_dispatch()
    returning: list[InFlight[torch.Tensor]] = []
    heat: list[torch.Tensor] = []
    for workspace_set in range(len(requests)):
        here = travelling.popleft().receive()
        heat.append(here.batch.heat_S)
        rows, metadata = kernel.compute(here.batch, weights, dtype, workspace_set), here.metadata
        del here
        returning.append(kernel.start_combine(rows, metadata))
        del rows
    beside_TH = [None if work is None else work.during_combine() for work in beside]
    first, second = (
        KernelResult(flight.receive(), heat_S, extra_TH)
        for flight, heat_S, extra_TH in zip(returning, heat, beside_TH, strict=True)
    )
    return first, second
