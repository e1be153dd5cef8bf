"""Token dispatchers, which send tokens to the ranks of their experts and send the outputs back."""

from __future__ import annotations

from eplb_lab.layer.dispatch.dispatchers import (
    All2AllVDispatcher,
    AllGatherDispatcher,
    BatchedDispatcher,
    MoGEDispatcher,
)
from eplb_lab.layer.dispatch.interface import Dispatched, DispatchRequest, TokenDispatcher
from eplb_lab.layer.dispatch.mc2 import MC2Dispatcher, MC2Limits, MC2Variant

__all__ = [
    "DISPATCHERS",
    "DISPATCHER_NAMES",
    "SHARED_TOKEN_DISPATCHERS",
    "BatchedDispatcher",
    "DispatchRequest",
    "Dispatched",
    "MC2Dispatcher",
    "MC2Limits",
    "MC2Variant",
    "TokenDispatcher",
]

DISPATCHERS: dict[str, type[All2AllVDispatcher | AllGatherDispatcher | MoGEDispatcher]] = {
    "all2allv": All2AllVDispatcher,
    "allgather": AllGatherDispatcher,
    "moge": MoGEDispatcher,
}
"""Dispatchers by name. MC2 is missing because its constructor also needs a variant and a separate group."""

DISPATCHER_NAMES = tuple(sorted([*DISPATCHERS, "mc2"]))

SHARED_TOKEN_DISPATCHERS = ("allgather", "moge")
"""Dispatchers that give all ranks the same tokens and require them to use the same ``log2phy`` table."""
