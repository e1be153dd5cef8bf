"""Token dispatchers: how tokens reach the ranks of their experts, and how the outputs come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker_agent.moe.dispatch.all2allv import All2AllVDispatcher
from worker_agent.moe.dispatch.allgather import AllGatherDispatcher
from worker_agent.moe.dispatch.interface import (
    AsyncTokenDispatcher,
    Dispatched,
    DispatchRequest,
    InFlight,
    TokenDispatcher,
)
from worker_agent.moe.dispatch.mc2 import MC2Dispatcher, MC2Variant
from worker_agent.moe.dispatch.moge import MoGEDispatcher
from worker_agent.moe.operators import Operators
from worker_agent.moe.rank_group import RankGroup

__all__ = [
    "DISPATCHER_NAMES",
    "SHARED_TOKEN_DISPATCHERS",
    "AsyncTokenDispatcher",
    "DispatchRequest",
    "Dispatched",
    "InFlight",
    "MC2Variant",
    "TokenDispatcher",
    "build_dispatcher",
]

_DISPATCHERS: dict[str, Callable[[RankGroup, int, Operators], TokenDispatcher[Any]]] = {
    "all2allv": All2AllVDispatcher,
    "allgather": AllGatherDispatcher,
    "mc2": MC2Dispatcher,
    "moge": MoGEDispatcher,
}

DISPATCHER_NAMES = tuple(_DISPATCHERS)

SHARED_TOKEN_DISPATCHERS = ("allgather", "moge")
"""Dispatchers under which all ranks see the same tokens and must use one log2phy."""


def build_dispatcher(
    name: str, group: RankGroup, slots: int, operators: Operators, mc2: MC2Variant | None = None
) -> TokenDispatcher[Any]:
    """The dispatcher of that name.

    Parameters
    ----------
    name
        One of ``DISPATCHER_NAMES``.
    group
        The EP ranks.
    slots
        Local experts per rank.
    operators
        The device's.
    mc2
        Variant of MC2's operators, where it is MC2.

    Raises
    ------
    ValueError
        Where there is no dispatcher of that name.
    """
    if name not in _DISPATCHERS:
        raise ValueError(f"unknown dispatcher {name!r}; use one of {', '.join(DISPATCHER_NAMES)}")
    if name == "mc2":
        return MC2Dispatcher(group, slots, operators, mc2)
    return _DISPATCHERS[name](group, slots, operators)
