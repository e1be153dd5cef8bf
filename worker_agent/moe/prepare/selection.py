"""The preparation that a dispatcher needs where every rank has tokens of its own."""

from __future__ import annotations

from typing import Any

from worker_agent.moe.dispatch.selection import SHARED_TOKEN_DISPATCHERS
from worker_agent.moe.operators import Operators
from worker_agent.moe.prepare.all2all import All2AllPreparation
from worker_agent.moe.prepare.interface import Preparation
from worker_agent.moe.prepare.mc2 import MC2Preparation
from worker_agent.moe.prepare.sequence_parallel import SequenceParallelPreparation
from worker_agent.moe.rank_group import RankGroup


def default_preparation(
    dispatcher: str, group: RankGroup, quantize_with: Operators | None = None
) -> Preparation[Any]:
    """Shared-token dispatchers gather, MC2 pads, All2AllV takes tokens as they come."""
    alone = RankGroup(None)
    if dispatcher in SHARED_TOKEN_DISPATCHERS:
        return SequenceParallelPreparation(group, quantize_with)
    return MC2Preparation(group, alone) if dispatcher == "mc2" else All2AllPreparation(alone)
