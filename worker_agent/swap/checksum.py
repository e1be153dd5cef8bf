"""Checksums of an expert's bytes, computed on the device that holds its weights.

On a CPU, the checksum is XXH3. On any other device, it is a weighted sum computed with torch operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import xxhash

from worker_agent.device import bytes_of

_MAX_NUMBERS = 1 << 20
"""Maximum number of integers per operation. It limits the temporary int64 products to 8 MiB."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiplier between chunks. It is odd, so multiplication by it modulo 2**64 is reversible."""


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return a 63-bit checksum of an expert's bytes.

    Checksums are only comparable between devices of the same kind. On an accelerator, the checksum is computed on the
    current stream, and only the result is copied to the host.

    Parameters
    ----------
    tensors
        The expert's tensors. Their order matters.

    Examples
    --------
    >>> weight = torch.tensor([1, 2, 3])
    >>> checksum([weight]) == checksum([weight.clone()])
    True
    >>> checksum([weight]) == checksum([weight.flip(0)])
    False
    """
    if tensors[0].device.type == "cpu":
        digest = xxhash.xxh3_64()
        for tensor in tensors:
            digest.update(bytes_of(tensor).numpy().data)
        return int(digest.intdigest() >> 1)
    return int(device_sum(tensors)) & ((1 << 63) - 1)


def device_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the position-weighted sum of the tensors' integers modulo 2**64, an int64 scalar on their device.

    A tensor's bytes are read as int32 if their number is a multiple of four, and as uint8 otherwise.

    Examples
    --------
    Positions start at 1: 3 * 1 + 5 * 2 = 13.

    >>> device_sum([torch.tensor([3, 5], dtype=torch.int32)])
    tensor(13)
    """
    device = tensors[0].device
    weight_N = _position_weights(device)
    total = torch.zeros((), dtype=torch.int64).to(device)
    for tensor in tensors:
        for numbers in _as_integers(bytes_of(tensor)).split(_MAX_NUMBERS):
            total = total * _FACTOR + (numbers.to(torch.int64) * weight_N[: numbers.numel()]).sum()
    return total


@lru_cache(maxsize=4)
def _position_weights(device: torch.device) -> torch.Tensor:
    """Return the weight of each position in a chunk, int64 ``[N]``."""
    return torch.arange(1, _MAX_NUMBERS + 1).to(device)


def _as_integers(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes viewed as int32 if their number is a multiple of four, and unchanged otherwise.

    Bytes at an offset that is not a multiple of four are copied first.
    """
    if data.numel() % 4:
        return data
    aligned = data if data.storage_offset() % 4 == 0 else data.clone()
    return aligned.view(torch.int32)
