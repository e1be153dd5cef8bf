"""Tests of packed arrays and of requests sent in parts: round trips, and rejection of malformed ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_core.wire.codec import MAX_MESSAGE_BYTES, MAX_PART, PART_BYTES, Parts, in_parts, pack, unpack
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2, tensor_pb2

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40)


@given(hnp.arrays(np.int32, SHAPES))
def test_an_array_survives_a_round_trip(array: np.ndarray) -> None:
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
def test_counts_are_packed_in_the_narrowest_type(highest: int, dtype: int) -> None:
    assert pack(np.array([0, highest])).dtype == dtype


def _array(**changes: object) -> tensor_pb2.PackedArray:
    fields = {"dtype": tensor_pb2.DATA_TYPE_UINT8, "shape": [2, 3], "data": b"abcdef", **changes}
    return tensor_pb2.PackedArray(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (_array(dtype=0), "unknown data type 0"),
        (_array(shape=[3, 2]), r"expected shape \[2, any\], got \[3, 2\]"),
        (_array(data=b"abcdefg"), "needs 6 bytes, got 7"),
        (_array(shape=[2, 2**24]), f"exceed the limit of {MAX_MESSAGE_BYTES}"),
        (
            _array(dtype=tensor_pb2.DATA_TYPE_INT64, shape=[2, 1], data=(2**40).to_bytes(8, "little") * 2),
            "outside the int32 range",
        ),
    ],
)
def test_a_malformed_array_is_rejected_and_the_error_names_it(
    packed: tensor_pb2.PackedArray, message: str
) -> None:
    with pytest.raises(WireError, match=message) as caught:
        unpack(packed, (2, None), "heat")
    assert str(caught.value).startswith("heat: ")


def _request(size: int) -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(error="x" * size))


def _part(data: bytes, bytes_left: int) -> agent_pb2.Part:
    return agent_pb2.Part(data=data, bytes_left=bytes_left)


@given(st.integers(0, 4 * PART_BYTES))
@example(PART_BYTES - 8)
@example(PART_BYTES - 7)
def test_parts_are_assembled_into_the_original_request(size: int) -> None:
    request = _request(size)
    sent = list(in_parts(request))
    assert all(message.ByteSize() <= MAX_PART for message in sent)
    if request.ByteSize() <= PART_BYTES:
        assert sent == [request]
        return
    first, *following = sent
    parts = Parts(first.part)
    assert parts.size == request.ByteSize()
    for message in following:
        assert not parts.complete
        parts.add(message.part)
    assert parts.complete
    assert parts.request() == request


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([_part(b"", 5)], "the size of part.data is 0"),
        ([_part(b"x" * (PART_BYTES + 1), 0)], "the size of part.data is 131073"),
        ([_part(b"x", 1 << 63)], "part.bytes_left is 9223372036854775808"),
        ([_part(b"x", 5), _part(b"x", 5)], "part.bytes_left is 5; it must be 4"),
        ([_part(b"x", 5), _part(b"xx", 2)], "part.bytes_left is 2; it must be 3"),
        ([_part(b"x", 5), _part(b"x" * 7, 0)], "part.bytes_left is 0; it must be -2"),
        ([_part(b"x", 1), _part(b"", 1)], "the size of part.data is 0"),
        ([_part(b"\xff\xff", 0)], "do not form a valid request"),
        ([_part(agent_pb2.ConnectRequest(part=_part(b"x", 0)).SerializeToString(), 0)], "form another part"),
    ],
)
def test_parts_that_do_not_form_a_request_are_rejected(parts: list[agent_pb2.Part], message: str) -> None:
    first, *following = parts
    with pytest.raises(WireError, match=message):  # noqa: PT012 # any of the parts may raise
        joined = Parts(first)
        for part in following:
            joined.add(part)
        joined.request()
