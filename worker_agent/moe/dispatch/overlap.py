"""Any dispatcher's halves as things that travel: those that cannot overlap other work have arrived at once."""

from __future__ import annotations

from typing import TypeVar

import torch

from worker_agent.moe.dispatch.interface import (
    AsyncTokenDispatcher,
    Dispatched,
    DispatchRequest,
    InFlight,
    Metadata,
    TokenDispatcher,
)

Result = TypeVar("Result")


def started_dispatch(
    dispatcher: TokenDispatcher[Metadata], request: DispatchRequest
) -> InFlight[Dispatched[Metadata]]:
    """Send the tokens, without waiting for them where the dispatcher can."""
    if isinstance(dispatcher, AsyncTokenDispatcher):
        return dispatcher.start_dispatch(request)
    return _arrived(dispatcher.dispatch(request))


def started_combine(
    dispatcher: TokenDispatcher[Metadata], rows: torch.Tensor, metadata: Metadata
) -> InFlight[torch.Tensor]:
    """Send the outputs back, without waiting for them where the dispatcher can."""
    if isinstance(dispatcher, AsyncTokenDispatcher):
        return dispatcher.start_combine(rows, metadata)
    return _arrived(dispatcher.combine(rows, metadata))


def _arrived(result: Result) -> InFlight[Result]:
    return InFlight(lambda: None, lambda: result)
