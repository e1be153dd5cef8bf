"""Token dispatchers: how tokens reach the ranks of their experts, and how the outputs come back."""

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, TokenDispatcher
from worker_agent.moe.dispatch.selection import build_dispatcher

__all__ = ["DispatchRequest", "Dispatched", "TokenDispatcher", "build_dispatcher"]
