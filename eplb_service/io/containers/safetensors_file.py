"""Arrays of a safetensors file: a header in JSON, then the numbers as they are in memory; nothing in it can run.

References
----------
https://huggingface.co/docs/safetensors: an 8-byte length, the header, then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array, check_fits_memory

_DTYPES = {
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F32": "<f4",
    "F64": "<f8",
}
_MOST_HEADER_BYTES = 100_000_000


def read_safetensors(path: Path) -> dict[str, Array]:
    """All arrays by name; raises ``HeatError`` (without the path) where the file is damaged or holds other types."""
    check_fits_memory(path.stat().st_size)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= length <= min(_MOST_HEADER_BYTES, len(content) - 8):
        raise HeatError("is no safetensors file, or truncated")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise HeatError("is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise HeatError("is no safetensors file: its header names no tensors")
    numbers = memoryview(content)[8 + length :]
    return {name: _array(name, entry, numbers) for name, entry in header.items() if name != "__metadata__"}


def _array(name: str, entry: Any, numbers: memoryview) -> Array:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise HeatError(f"names tensor {name[:64]!r} without type, shape and place") from error
    if kind not in _DTYPES:
        raise HeatError(
            f"holds tensor {name[:64]!r} of type {kind!r}; counts are whole numbers, or float32 or float64"
        )
    dtype = np.dtype(_DTYPES[kind])
    if not (whole and begin <= end <= len(numbers) and end - begin == math.prod(shape) * dtype.itemsize):
        raise HeatError(f"is truncated or damaged: tensor {name[:64]!r} is not where the header says")
    return np.frombuffer(numbers[begin:end], dtype=dtype).reshape(shape)
