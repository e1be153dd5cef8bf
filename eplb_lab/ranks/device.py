"""The device that a demo's rank stands for: its time follows a cost curve, and the rank sleeps for so long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eplb_lab.layer import ExpertParallelMoE


@dataclass(frozen=True)
class Device:
    """A device by the cost curve of its experts.

    Parameters
    ----------
    floor_us, read_us, launch_us, slope_us
        The curve, as in ``eplb_core.cost.curve``: microseconds of a layer, of reading a slot's weights, and of
        computing a slot's tokens.
    tokens
        Tokens of the device for each token of the demo.
    layers
        MoE layers of the device's model; the demo's layers stand for equal parts of them.
    """

    floor_us: float
    read_us: float
    launch_us: float
    slope_us: float
    tokens: int
    layers: int

    def step_ms(self, slot_tokens: Sequence[torch.Tensor]) -> float:
        """Return the milliseconds of all layers on this rank, from the tokens of each slot, ``[S]`` for each layer."""
        us = 0.0
        for tokens_S in slot_tokens:
            busy_S = tokens_S[tokens_S > 0].to(torch.float64) * self.tokens
            each_S = torch.clamp(self.launch_us + self.slope_us * busy_S, min=self.read_us)
            us += self.floor_us + float(each_S.sum())
        return us / 1e3 * self.layers / max(1, len(slot_tokens))


def sleep_until(began: float, ms: float) -> None:
    """Sleep until ``ms`` milliseconds have passed since ``began``, by ``time.perf_counter``."""
    time.sleep(max(0.0, began + ms / 1e3 - time.perf_counter()))


def slot_tokens(layers: Sequence[ExpertParallelMoE]) -> list[torch.Tensor]:
    """Return the tokens of each slot in the step just run, ``[S]`` for each layer."""
    return [_last_row(layer) for layer in layers]


def _last_row(layer: ExpertParallelMoE) -> torch.Tensor:
    ring_WS = layer.moe_load
    assert ring_WS is not None
    return ring_WS[(int(layer.load_counter) - 1) % ring_WS.shape[0]]
