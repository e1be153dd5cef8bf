"""Token dispatchers: how tokens reach the ranks of their experts, and how the outputs come back."""

from worker_agent.moe.dispatch.interface import (
    AsyncTokenDispatcher,
    Dispatched,
    DispatchRequest,
    InFlight,
    TokenDispatcher,
)
from worker_agent.moe.dispatch.mc2_variant import MC2Variant
from worker_agent.moe.dispatch.selection import build_dispatcher

__all__ = [
    "AsyncTokenDispatcher",
    "DispatchRequest",
    "Dispatched",
    "InFlight",
    "MC2Variant",
    "TokenDispatcher",
    "build_dispatcher",
]
