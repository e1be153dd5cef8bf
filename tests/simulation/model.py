"""A host and its model on one simulated rank.

Passes are queued ahead of the device, and each is checked when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eplb_core.placement import Placement, expert_map
from tests.simulation.scheduler import Process

ROWS = 64


class SimulatedLayer:
    """A live layer whose expert ``e`` is stored as two values ``1000 layer + e``.

    Its memory holds the slots, then ``log2phy``.
    """

    shares_tokens = False

    def __init__(
        self, rank: int, layer: int, memory_X: torch.Tensor, placement: Placement, counter: torch.Tensor
    ) -> None:
        slots_S = placement.phy2log_LRS[layer, rank]
        self.expert_map = torch.from_numpy(expert_map(slots_S, placement.experts).copy())
        self.log2phy = memory_X[2 * len(slots_S) :].view(torch.int32)
        self.log2phy[:] = torch.from_numpy(placement.default_log2phy()[rank, layer])
        self._weights = [memory_X[: 2 * len(slots_S)].view(-1, 2)]
        self._weights[0][:] = torch.from_numpy(1000 * layer + slots_S)[:, None]
        self.moe_load = None
        self.source_load = torch.zeros(ROWS, placement.experts, dtype=torch.int32)
        self.load_counter = counter

    def expert_weights(self) -> list[torch.Tensor]:
        return self._weights


@dataclass
class Misfits:
    """A host's deviations from one call per pass: missed calls, repeated calls, and passes counted twice."""

    missed: int = 0
    doubled: int = 0
    counted: int = 0


class Model:
    """Model of one engine, which runs forward passes. A pass runs on all devices once every rank has queued it.

    A pass uses each rank's memory as it was when that rank queued the pass. Hosts run up to ``ahead`` calls ahead of
    their devices. If ``ahead`` is 1, a host waits for each pass. The number of passes between two calls is the same on
    all ranks: the value of ``stride`` when the first rank queues them.
    """

    def __init__(
        self, processes: list[Process], shapes: Any, breach: Callable[[str], None], stride: Callable[[], int]
    ) -> None:
        self.placement = shapes.placement
        self.seconds = shapes.pass_seconds
        # Ranks with an odd number run further ahead, unless all hosts wait for each pass.
        self.ahead = [shapes.ahead + rank % 2 * (shapes.ahead - 1) for rank in range(len(processes))]
        self.queued = [0] * len(processes)
        self.run = self.passes = self._begun = 0
        self._changed = [process.condition() for process in processes]
        self._scheduler = processes[0].scheduler
        self._free_at = 0.0
        self._stride = stride
        self._breach = breach
        self._strides: dict[int, int] = {}
        self._served: dict[int, list[bytes]] = {}
        self._right: set[tuple[bytes, ...]] = set()

    def queue(self, rank: int, memory_LX: torch.Tensor, counter: torch.Tensor) -> None:
        """Queue one rank's passes up to its next call, with a copy of its current memory.

        Wait if the device is far behind.
        """
        self.queued[rank] += 1
        number = self.queued[rank]
        counter += self._strides.get(number) or self._strides.setdefault(number, self._stride())
        self._served.setdefault(number, [b""] * len(self.queued))[rank] = memory_LX.numpy().tobytes()
        if min(self.queued) > self._begun:
            self._begun += 1
            began = max(self._scheduler.now, self._free_at)
            took = self.seconds * self._strides[self._begun] * self._scheduler.random.uniform(0.9, 1.1)
            self._free_at = began + took
            self._scheduler.at(self._free_at, self._ended)
        self._changed[rank].wait_for(lambda: number - self.run < self.ahead[rank])

    def at_rest(self, rank: int, seconds: float | None = None) -> bool:
        """Wait until the device has run all passes that this rank has queued, or for at most ``seconds``."""
        return self._changed[rank].wait_for(lambda: self.run >= self.queued[rank], seconds)

    def _ended(self) -> None:
        self.run += 1
        self.passes += self._strides.pop(self.run)
        served = tuple(self._served.pop(self.run))
        if served not in self._right:
            self._check(served)
        for changed in self._changed:
            changed.notify()

    def _check(self, served: tuple[bytes, ...]) -> None:
        layers, ranks, slots = self.placement.phy2log_LRS.shape
        memory_RLX = np.frombuffer(b"".join(served), np.int64).reshape(ranks, layers, -1)
        for layer, memory_RX in enumerate(memory_RLX.swapaxes(0, 1)):
            held = memory_RX[:, : 2 * slots].reshape(-1, 2)
            expected_E1 = 1000 * layer + np.arange(self.placement.experts)[:, None]
            for rank, routes in enumerate(memory_RX[:, 2 * slots :].copy().view(np.int32)):
                wrong = np.flatnonzero((held[routes] != expected_E1).any(axis=1))
                if wrong.size:
                    self._breach(
                        f"WRONG TOKENS in pass {self.passes}: layer {layer}, rank {rank} sends the tokens of "
                        f"expert {wrong[0]} to a slot that holds {held[routes[wrong[0]]].tolist()}"
                    )
                    return
        self._right.add(served)
