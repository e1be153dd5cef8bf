"""Weights that a transfer carries in the tests of lanes, and the order to carry them."""

from __future__ import annotations

import numpy as np
import torch

from eplb_service.wire.plan import RankLayer
from worker_agent.swap.actions import StartTransfer

RANKS, SLOTS = 3, 4
HERE = torch.device("cpu")


class PlainLayer:
    """The weights of one layer; rank ``r``'s slot ``s`` holds ``100 r + s`` and its own noise."""

    def __init__(self, rank: int, where: torch.device = HERE) -> None:
        fill = (100.0 * rank + torch.arange(SLOTS)).reshape(-1, 1, 1)
        self._weights = [
            (fill + torch.rand(SLOTS, 3, 5)).to(where),
            (fill + torch.rand(SLOTS, 7, 1)).to(torch.float16).to(where),
        ]

    def expert_weights(self) -> list[torch.Tensor]:
        return self._weights


def order(generation: int, *moves: tuple[int, ...]) -> StartTransfer:
    none = np.zeros(0, dtype=np.int32)
    return StartTransfer(RankLayer(0, none, none, (), np.array(moves, dtype=np.int32)), generation, 0)
