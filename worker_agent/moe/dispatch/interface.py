"""The one interface of all token dispatchers: what goes in, what comes out, what is carried in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from worker_agent.moe.operators import GroupListType

Metadata = TypeVar("Metadata")
"""What ``combine`` must know of ``dispatch``; each dispatcher has its own type."""


@dataclass(frozen=True)
class DispatchRequest:
    """This rank's tokens and where they want to go. T may be 0."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    """Logical experts, int32 or int64."""

    topk_weights_TK: torch.Tensor
    log2phy_E: torch.Tensor
    """int32: the physical expert that serves each logical one, for the tokens that this rank sends."""

    check_values: bool = False
    """Whether a dispatcher with demands on the ids themselves checks them; on an accelerator that waits for it."""

    quantized: bool = False
    """Whether experts want int8 rows with one scale each; dispatchers quantize before sending where they can."""


@dataclass(frozen=True)
class Dispatched(Generic[Metadata]):
    """The tokens that this rank's experts must work on."""

    rows_NH: torch.Tensor
    """Token choices sorted by local slot; rows past the group list are to be ignored."""

    group_list_S: torch.Tensor
    """int64: the rows of each local slot."""

    group_list_type: GroupListType
    metadata: Metadata
    dynamic_scale_N: torch.Tensor | None = None
    """float32: the scale of each row, where rows are int8."""


class TokenDispatcher(Protocol[Metadata]):
    """Both halves are collective: every rank of the group calls them at every step, with or without tokens.

    Nothing of a call stays on the dispatcher; what ``combine`` needs travels in ``Dispatched.metadata``.
    """

    def dispatch(self, request: DispatchRequest) -> Dispatched[Metadata]:
        """Bring token choices to the ranks of their physical experts."""
        ...

    def combine(self, rows_NH: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Bring expert outputs, in the order of ``rows_NH``, back and weigh them: this rank's ``[T, H]``."""
        ...


def to_physical(topk_ids_TK: torch.Tensor, log2phy_E: torch.Tensor) -> torch.Tensor:
    """The physical expert of each choice."""
    return log2phy_E.index_select(0, topk_ids_TK.reshape(-1)).view_as(topk_ids_TK)
