"""Packed integer arrays: numpy to wire and back, with every size checked before memory is taken."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import tensor_pb2

PROTOCOL_VERSION = 2
"""Version of the stream; both sides refuse another."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Bound on one gRPC message, and on one array after inflation."""

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
"""An array of any integer type; its dimensions are in the variable's name."""

_DTYPES: dict[int, np.dtype[np.generic]] = {
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DATA_TYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
}
_COMPRESS_FROM_BYTES = 4096
_SAMPLE_BYTES = 16384
_WORTH_INFLATING = 3
"""Deflating must win this factor: the service inflates what all ranks send, and links are faster than that."""


def pack(array: npt.NDArray[np.integer]) -> tensor_pb2.PackedArray:
    """Pack an integer array in the narrowest type that holds it (heat is mostly small numbers).

    Arrays of 4 KiB and more are deflated where that makes them a third or less.
    """
    code, narrow = narrowed(array)
    data = narrow.tobytes()
    packed = tensor_pb2.PackedArray(dtype=code, shape=array.shape, data=data)  # type: ignore[arg-type]
    if len(data) >= _COMPRESS_FROM_BYTES and _deflates_well(data[:_SAMPLE_BYTES]):
        packed.data, packed.compression = zlib.compress(data, level=1), tensor_pb2.COMPRESSION_ZLIB
    return packed


def narrowed(array: npt.NDArray[np.integer]) -> tuple[int, Integers]:
    """The array in the narrowest type that travels and holds it, and that type's code; in one piece."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    code, dtype = _narrowest(low, high)
    return code, np.ascontiguousarray(array, dtype=dtype)


def unpack(packed: tensor_pb2.PackedArray, shape: Sequence[int | None], field: str) -> Int32:
    """Unpack to int32 of exactly ``shape`` (``None`` admits any size of that axis).

    Raises ``WireError`` naming ``field`` where type, shape or size is off or a value is past int32. Never takes
    more than ``MAX_MESSAGE_BYTES``, whatever the sender claims.
    """
    wide = unpack_as_sent(packed, shape, field)
    array = wide.astype(np.int32)
    if wide.dtype.itemsize == 8 and not np.array_equal(array, wide):
        raise WireError(f"{field}: a value is past the range of int32")
    return array


def unpack_as_sent(packed: tensor_pb2.PackedArray, shape: Sequence[int | None], field: str) -> Integers:
    """``unpack`` without the copy: read-only, in the type that it travelled in."""
    if packed.dtype not in _DTYPES:
        raise WireError(f"{field}: unknown data type {packed.dtype}")
    dtype = _DTYPES[packed.dtype]
    found = tuple(packed.shape)
    if len(found) != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise WireError(f"{field}: expected the shape [{wanted}], got {list(found)}")
    size = math.prod(found) * dtype.itemsize
    # int32 is what comes out, so a narrow array may not claim four times the bound either.
    if max(size, math.prod(found) * 4) > MAX_MESSAGE_BYTES:
        raise WireError(f"{field}: {size} bytes are past the limit of {MAX_MESSAGE_BYTES}")
    data = _inflate(packed, size, field)
    if len(data) != size:
        raise WireError(f"{field}: shape {list(found)} of {dtype.name} needs {size} bytes, got {len(data)}")
    array: Integers = np.frombuffer(data, dtype=dtype).reshape(found)
    return array


def _deflates_well(sample: bytes) -> bool:
    return _WORTH_INFLATING * len(zlib.compress(sample, level=1)) <= len(sample)


def _narrowest(low: int, high: int) -> tuple[int, np.dtype[np.generic]]:
    for code, dtype in _DTYPES.items():
        bounds = np.iinfo(dtype.name)
        if bounds.min <= low and high <= bounds.max:
            return code, dtype
    raise WireError(f"values {low}..{high} fit no wire type")


def _inflate(packed: tensor_pb2.PackedArray, size: int, field: str) -> bytes:
    if packed.compression == tensor_pb2.COMPRESSION_UNSPECIFIED:
        return packed.data
    if packed.compression != tensor_pb2.COMPRESSION_ZLIB:
        raise WireError(f"{field}: unknown compression {packed.compression}")
    stream = zlib.decompressobj()
    try:
        # One byte past the expected size is enough to see that there is too much.
        data = stream.decompress(packed.data, size + 1)
    except zlib.error as error:
        raise WireError(f"{field}: compressed data is damaged ({error})") from error
    if not stream.eof or stream.unused_data:
        raise WireError(f"{field}: compressed data does not end at {size} bytes")
    return data
