"""Checksums of experts, computed on the device that holds them: with XXH3 on a CPU, else with torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import xxhash

from worker_agent.device import bytes_of

_MAX_NUMBERS = 1 << 20
"""Numbers to add in one operation. It bounds the memory of a sum, which takes eight bytes per number."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that multiplying by it modulo 2**64 is reversible."""


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return a 63-bit checksum of the bytes of an expert's tensors, in their order.

    Equal bytes have equal checksums only on the same kind of device. On a device, the checksum is computed on the
    current stream, and only the result is copied to the host.
    """
    if tensors[0].device.type == "cpu":
        sum_of_all = xxhash.xxh3_64()
        for tensor in tensors:
            sum_of_all.update(bytes_of(tensor).numpy().data)
        return int(sum_of_all.intdigest() >> 1)
    return int(device_sum(tensors)) & ((1 << 63) - 1)


def device_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the tensors' numbers modulo 2**64, weighted by position, as int64 on their device."""
    device = tensors[0].device
    weight_N = _place_weights(device)
    total = torch.zeros((), dtype=torch.int64).to(device)
    for tensor in tensors:
        for numbers in _numbers(bytes_of(tensor)).split(_MAX_NUMBERS):
            total = total * _FACTOR + (numbers.to(torch.int64) * weight_N[: numbers.numel()]).sum()
    return total


@lru_cache(maxsize=4)
def _place_weights(device: torch.device) -> torch.Tensor:
    """Return the weight of each position, int64 ``[N]``."""
    return torch.arange(1, _MAX_NUMBERS + 1).to(device)


def _numbers(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes as int32 if their number is a multiple of four, else unchanged; copy them if not aligned."""
    if data.numel() % 4:
        return data
    aligned = data if data.storage_offset() % 4 == 0 else data.clone()
    return aligned.view(torch.int32)
