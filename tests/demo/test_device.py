"""Tests that the emulated device follows the shipped cost curve and that the rank sleeps no longer than that."""

from __future__ import annotations

import time

import pytest
import torch

from eplb_core.cost.curve import read_curve
from eplb_lab.demo.stage import _DEVICE, _device
from eplb_lab.ranks.device import Device, sleep_until


@pytest.mark.parametrize("tokens", [[0, 0, 3], [16, 5, 40], [0, 0, 0]])
def test_the_time_of_a_step_follows_the_cost_curve_for_all_layers(tokens: list[int]) -> None:
    device = Device(**_device())
    curve = read_curve(str(_DEVICE))
    of_layers = [torch.tensor(tokens), torch.tensor(tokens[::-1])]
    scaled = [device.tokens * count for count in tokens]
    assert device.step_ms(of_layers) == pytest.approx(device.layers * float(curve.rank_us(scaled)) / 1e3)


def test_a_rank_with_more_tokens_takes_longer() -> None:
    device = Device(**_device())
    assert device.step_ms([torch.tensor([40, 40])]) > 1.5 * device.step_ms([torch.tensor([20, 20])])


def test_a_rank_sleeps_only_until_the_device_would_have_finished() -> None:
    began = time.perf_counter()
    sleep_until(began, 30.0)
    assert time.perf_counter() - began >= 0.03
    late = time.perf_counter()
    sleep_until(began, 5.0)
    assert time.perf_counter() - late < 0.02
