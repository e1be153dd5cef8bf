"""What happens to a rank's tokens before dispatch and to its outputs after combine: padding, slicing, gathering."""

from worker_agent.moe.prepare.gathering import AllGatherPreparation, SequenceParallelPreparation
from worker_agent.moe.prepare.slicing import (
    All2AllPreparation,
    MC2Preparation,
    Preparation,
    Prepared,
    Tokens,
)

__all__ = [
    "All2AllPreparation",
    "AllGatherPreparation",
    "MC2Preparation",
    "Preparation",
    "Prepared",
    "SequenceParallelPreparation",
    "Tokens",
]
