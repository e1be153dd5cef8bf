"""What happens to a rank's tokens before dispatch and to its outputs after combine: padding, slicing, gathering."""

from worker_agent.moe.prepare.all2all import All2AllPreparation
from worker_agent.moe.prepare.allgather import AllGatherPreparation
from worker_agent.moe.prepare.interface import Preparation, Prepared, Tokens
from worker_agent.moe.prepare.mc2 import MC2Preparation
from worker_agent.moe.prepare.selection import default_preparation
from worker_agent.moe.prepare.sequence_parallel import SequenceParallelPreparation

__all__ = [
    "All2AllPreparation",
    "AllGatherPreparation",
    "MC2Preparation",
    "Preparation",
    "Prepared",
    "SequenceParallelPreparation",
    "Tokens",
    "default_preparation",
]
