"""The one interface of all token dispatchers: what goes in, what comes out, what is carried in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch

Metadata = TypeVar("Metadata")
"""What ``combine`` must know of ``dispatch``; each dispatcher has its own type."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class DispatchRequest:
    """This rank's tokens and where they want to go. T may be 0."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    """Logical experts, int32 or int64; where ``masked``, -1 for a choice that is not real."""

    topk_weights_TK: torch.Tensor
    log2phy_E: torch.Tensor
    """int32: the physical expert that serves each logical one, for the tokens that this rank sends."""

    masked: bool = False
    """Whether there may be choices that are not real. They are routed nowhere, weigh nothing and count nowhere."""

    scale_T: torch.Tensor | None = None
    """float32: the scale of each token, where ``hidden`` is int8 already."""

    quantized: bool = False
    """Whether experts want int8 rows with one scale each; dispatchers quantize before sending where they can."""

    experts_weigh: bool = False
    """Whether rows must bring their weights to the experts; ``combine`` then only sums."""

    check_values: bool = False
    """Whether a dispatcher with demands on the ids themselves checks them; on an accelerator that waits for it."""

    @property
    def active_TK(self) -> torch.Tensor | None:
        """bool: the choices that are real; ``None`` where all are."""
        return self.topk_ids_TK >= 0 if self.masked else None

    def physical(self, nowhere: int) -> torch.Tensor:
        """The physical expert of each choice, ``[T, K]``; ``nowhere`` for choices that are not real."""
        ids_TK, active_TK = self.topk_ids_TK, self.active_TK
        known_TK = ids_TK if active_TK is None else ids_TK.clamp(min=0)
        physical_TK = self.log2phy_E.index_select(0, known_TK.reshape(-1)).view_as(ids_TK)
        return physical_TK if active_TK is None else physical_TK.masked_fill(~active_TK, nowhere)

    def real_weights(self) -> torch.Tensor:
        """float32 ``[T, K]``: the weights, zero for choices that are not real."""
        weights_TK, active_TK = self.topk_weights_TK.float(), self.active_TK
        return weights_TK if active_TK is None else weights_TK * active_TK

    def weighed_on_input(self) -> DispatchRequest:
        """The same with each token multiplied by its weight, instead of its output: K is 1."""
        weighed_TH = self.hidden_TH * self.topk_weights_TK.to(self.hidden_TH.dtype)
        return replace(self, hidden_TH=weighed_TH, topk_weights_TK=torch.ones_like(self.topk_weights_TK))


@dataclass(frozen=True)
class Dispatched(Generic[Metadata]):
    """What has arrived for this rank's experts, and what the way back needs."""

    batch: ExpertBatch
    metadata: Metadata


@dataclass(frozen=True)
class InFlight(Generic[Result]):
    """Something that travels while the caller does other work."""

    hook: Callable[[], object]
    """Waits for the communication alone; an overlapping caller may call it early, and need not."""

    receive: Callable[[], Result]
    """Waits, and does what is left to do with what came. To be called once."""


class TokenDispatcher(Protocol[Metadata]):
    """Both halves are collective: every rank of the group calls them at every step, with or without tokens.

    Nothing of a call stays on the dispatcher; what ``combine`` needs travels in ``Dispatched.metadata``.
    """

    format: ActivationFormat
    brings_weights: bool
    """Whether it serves requests whose experts weigh."""

    def dispatch(self, request: DispatchRequest) -> Dispatched[Metadata]:
        """Bring token choices to the ranks of their physical experts."""
        ...

    def combine(self, rows: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Bring expert outputs, in the order of the batch's rows, back and weigh and sum them: ``[T, H]``."""
        ...


@runtime_checkable
class AsyncTokenDispatcher(Protocol[Metadata]):
    """A dispatcher whose tokens travel while the caller does other work."""

    def start_dispatch(self, request: DispatchRequest) -> InFlight[Dispatched[Metadata]]:
        """As ``dispatch``, without waiting for the tokens."""
        ...

    def start_combine(self, rows: torch.Tensor, metadata: Metadata) -> InFlight[torch.Tensor]:
        """As ``combine``, without waiting for the outputs."""
        ...
