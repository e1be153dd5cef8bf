"""Packed arrays come back as they were, and whatever is off about one is refused before it costs memory."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from eplb_service.wire.codec import MAX_MESSAGE_BYTES, pack, unpack
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import tensor_pb2

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40)


@given(hnp.arrays(np.int32, SHAPES))
def test_an_array_comes_back_as_it_was(array: np.ndarray) -> None:
    unpacked = unpack(pack(array), array.shape, "x")
    assert unpacked.dtype == np.int32
    assert np.array_equal(unpacked, array)


@pytest.mark.parametrize(
    ("highest", "dtype"),
    [
        (255, tensor_pb2.DATA_TYPE_UINT8),
        (256, tensor_pb2.DATA_TYPE_UINT16),
        (65536, tensor_pb2.DATA_TYPE_INT32),
        (2**31, tensor_pb2.DATA_TYPE_INT64),
    ],
)
def test_heat_travels_in_the_narrowest_type(highest: int, dtype: int) -> None:
    assert pack(np.array([0, highest])).dtype == dtype


def test_what_other_releases_deflate_is_read() -> None:
    packed = pack(np.arange(6).reshape(2, 3))
    packed.data, packed.compression = zlib.compress(packed.data), tensor_pb2.COMPRESSION_ZLIB
    np.testing.assert_array_equal(unpack(packed, (2, 3), "x"), np.arange(6).reshape(2, 3))


def _array(**changes: object) -> tensor_pb2.PackedArray:
    fields = {"dtype": tensor_pb2.DATA_TYPE_UINT8, "shape": [2, 3], "data": b"abcdef", **changes}
    return tensor_pb2.PackedArray(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("packed", "complaint"),
    [
        (_array(dtype=0), "unknown data type 0"),
        (_array(dtype=77), "unknown data type 77"),
        (_array(shape=[3, 2]), r"expected the shape \[2, any\], got \[3, 2\]"),
        (_array(shape=[6]), r"expected the shape \[2, any\], got \[6\]"),
        (_array(data=b"abc"), "needs 6 bytes, got 3"),
        (_array(data=b"abcdefg"), "needs 6 bytes, got 7"),
        (_array(compression=9), "unknown compression 9"),
        (_array(compression=1), "compressed data is damaged"),
        (_array(compression=1, data=zlib.compress(b"abc")), "needs 6 bytes, got 3"),
        (_array(compression=1, data=zlib.compress(b"abcdef")[:-2]), "does not end at 6 bytes"),
        (_array(compression=1, data=zlib.compress(b"abcdef") + b"!"), "does not end at 6 bytes"),
        (_array(compression=1, data=zlib.compress(bytes(10**6))), "does not end at 6 bytes"),
        (_array(shape=[2, 2**31]), f"past the limit of {MAX_MESSAGE_BYTES}"),
        (_array(shape=[2, 2**24]), f"past the limit of {MAX_MESSAGE_BYTES}"),
        (
            _array(dtype=tensor_pb2.DATA_TYPE_INT64, shape=[2, 1], data=(2**40).to_bytes(8, "little") * 2),
            "past the range",
        ),
    ],
)
def test_a_malformed_array_is_refused_by_name(packed: tensor_pb2.PackedArray, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint) as caught:
        unpack(packed, (2, None), "heat")
    assert str(caught.value).startswith("heat: ")
