"""Tensors of different dtypes side by side in rows of bytes, so that one collective carries them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_rows(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors ``[T, width]`` as one uint8 ``[T, B]``."""
    return torch.cat([_as_bytes(column) for column in columns], dim=1)


def unpack_rows(packed_TB: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that ``pack_rows`` packed, with the dtypes and widths of ``like``."""
    widths = [column.shape[1] * column.element_size() for column in like]
    parts = torch.split(packed_TB, widths, dim=1)
    # Always copied: even a lone row, which is contiguous, may begin where no value of its dtype can.
    copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return [part.view(column.dtype) for part, column in zip(copies, like, strict=True)]


def _as_bytes(column_TX: torch.Tensor) -> torch.Tensor:
    return column_TX.contiguous().view(torch.uint8)
