"""Device that a demo rank emulates. Its step time follows a cost curve, and the rank sleeps for that long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eplb_lab.layer import ExpertParallelMoE


@dataclass(frozen=True)
class Device:
    """Emulated device with the cost curve of its experts, as in ``eplb_core.cost.curve``.

    Parameters
    ----------
    floor_us
        Fixed time per layer in microseconds, in addition to the time of the slots.
    read_us
        Time to read a slot's weights in microseconds. It is the minimum time for a slot with tokens.
    launch_us
        Fixed time per slot with tokens in microseconds, in addition to the time of the tokens.
    slope_us
        Time per token in microseconds.
    tokens
        Number of tokens on the device that each token of the demo represents.
    layers
        Number of MoE layers in the device's model. Each layer of the demo represents an equal share of them.

    Examples
    --------
    One layer has two slots with tokens. Reading the weights takes longer than computing 10 tokens, but not 100:

    >>> device = Device(floor_us=10.0, read_us=20.0, launch_us=5.0, slope_us=1.0, tokens=1, layers=1)
    >>> device.step_ms([torch.tensor([10, 0, 100])])
    0.135
    """

    floor_us: float
    read_us: float
    launch_us: float
    slope_us: float
    tokens: int
    layers: int

    def step_ms(self, slot_tokens: Sequence[torch.Tensor]) -> float:
        """Return a step's duration on this rank in milliseconds, given the tokens of each slot, ``[S]`` per layer."""
        us = 0.0
        for tokens_S in slot_tokens:
            busy_S = tokens_S[tokens_S > 0].to(torch.float64) * self.tokens
            slot_us_S = torch.clamp(self.launch_us + self.slope_us * busy_S, min=self.read_us)
            us += self.floor_us + float(slot_us_S.sum())
        return us / 1e3 * self.layers / max(1, len(slot_tokens))


def sleep_until(start: float, ms: float) -> None:
    """Sleep until ``ms`` milliseconds after ``start``, a value of ``time.perf_counter``."""
    time.sleep(max(0.0, start + ms / 1e3 - time.perf_counter()))


def slot_tokens(layers: Sequence[ExpertParallelMoE]) -> list[torch.Tensor]:
    """Return the number of tokens that each slot received in the last step, ``[S]`` per layer."""
    return [_last_row(layer) for layer in layers]


def _last_row(layer: ExpertParallelMoE) -> torch.Tensor:
    """Return the layer's load in the last step, from its heat ring."""
    ring_WS = layer.moe_load
    assert ring_WS is not None
    return ring_WS[(int(layer.load_counter) - 1) % ring_WS.shape[0]]
