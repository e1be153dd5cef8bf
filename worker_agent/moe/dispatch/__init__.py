"""Token dispatchers: tokens to the ranks of their experts, and the outputs back."""

from __future__ import annotations

from worker_agent.moe.dispatch.dispatchers import (
    All2AllVDispatcher,
    AllGatherDispatcher,
    BatchedDispatcher,
    MoGEDispatcher,
)
from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, TokenDispatcher
from worker_agent.moe.dispatch.mc2 import MC2Dispatcher, MC2Limits, MC2Variant
from worker_agent.moe.operators import Operators
from worker_agent.moe.rank_group import RankGroup

__all__ = [
    "DISPATCHER_NAMES",
    "SHARED_TOKEN_DISPATCHERS",
    "BatchedDispatcher",
    "DispatchRequest",
    "Dispatched",
    "MC2Limits",
    "MC2Variant",
    "TokenDispatcher",
    "build_dispatcher",
]

_DISPATCHERS = {
    "all2allv": All2AllVDispatcher,
    "allgather": AllGatherDispatcher,
    "mc2": MC2Dispatcher,
    "moge": MoGEDispatcher,
}

DISPATCHER_NAMES = tuple(_DISPATCHERS)

SHARED_TOKEN_DISPATCHERS = ("allgather", "moge")
"""Dispatchers under which all ranks see the same tokens and must use one log2phy."""


def build_dispatcher(
    name: str,
    group: RankGroup,
    slots: int,
    operators: Operators,
    mc2: MC2Variant,
    mc2_group: RankGroup,
) -> TokenDispatcher:
    """Make the dispatcher of that ``name``, one of ``DISPATCHER_NAMES``; ``ValueError`` where it is none.

    ``group`` has the EP ranks with ``slots`` local experts each, ``operators`` are the device's. ``mc2`` is the
    variant of MC2's, which talk in ``mc2_group``.
    """
    if name not in _DISPATCHERS:
        raise ValueError(f"unknown dispatcher {name!r}; use one of {', '.join(DISPATCHER_NAMES)}")
    if name == "mc2":
        return MC2Dispatcher(group, slots, operators, mc2, mc2_group)
    dispatcher: TokenDispatcher = _DISPATCHERS[name](group, slots, operators)
    return dispatcher
