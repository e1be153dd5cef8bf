"""A checksum over one expert, so that what was sent can be told from what was installed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch


def expert_checksum(parts: Sequence[torch.Tensor]) -> int:
    """CRC-32 over the bytes of an expert's tensors, in their order; reads them from their device."""
    value = 0
    for part in parts:
        value = zlib.crc32(bytes_of(part).cpu().numpy().data, value)
    return value


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)
