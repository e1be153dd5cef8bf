"""Bytes from anywhere end in a message or in one clear error, and never take more memory than the wire's bound."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.wire.codec import MAX_MESSAGE_BYTES, pack, unpack
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import tensor_pb2
from tests.fuzz.decoders import DECODERS, Decoder, outcome_of

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]), st.integers(0, 1 << 16), st.binary(max_size=8)
    ),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    """Valid bytes, damaged as a bad link or a bad program would."""
    changed = bytearray(data)
    for kind, where, piece in edits:
        at = where % (len(changed) + 1)
        if kind == "flip" and at < len(changed):
            changed[at] ^= (piece or b"\x01")[0] or 1
        elif kind == "cut":
            del changed[at : at + max(1, len(piece))]
        elif kind == "insert":
            changed[at:at] = piece
        else:
            changed[at:at] = changed[at : at + 16]
    return bytes(changed)


@pytest.mark.parametrize("name", DECODERS)
def test_undamaged_bytes_are_read(name: str) -> None:
    seeds = DECODERS[name].seeds()
    assert seeds
    for data in seeds:
        DECODERS[name].read(data)


@pytest.mark.parametrize("name", DECODERS)
@given(which=st.integers(0, 9), edits=EDITS)
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_end_in_one_clear_error(
    name: str, which: int, edits: list[tuple[str, int, bytes]]
) -> None:
    seeds = DECODERS[name].seeds()
    outcome_of(DECODERS[name], edited(seeds[which % len(seeds)], edits))


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_ends_in_one_clear_error(name: str, data: bytes) -> None:
    outcome_of(DECODERS[name], data)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from([0, 1, 2, 3, 4, 99]),
    "shape": st.lists(st.integers(0, 2**32 - 1), max_size=4),
    "compression": st.sampled_from([0, 1, 7]),
    "data": st.binary(max_size=64),
}


@given(st.fixed_dictionaries(FIELDS))
@settings(max_examples=300, deadline=None)
def test_an_array_that_lies_about_itself_is_refused(fields: dict[str, Any]) -> None:
    read: list[Any] = []
    packed = tensor_pb2.PackedArray(**fields)
    decoder = Decoder(list, lambda _: read.append(unpack(packed, (None, 5), "field")), (WireError,))
    reported = outcome_of(decoder, b"")
    assert reported.startswith("field: ") or (read[0].dtype, read[0].shape[1]) == (np.int32, 5)


def test_a_small_message_cannot_take_much_memory() -> None:
    """Zeros deflate a thousandfold: what a bomb inflates to is bounded by the shape that was asked for."""
    bomb = pack(np.zeros((1 << 20, 5), dtype=np.int32))
    bomb.shape[0] = 3
    claims = tensor_pb2.PackedArray(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[1 << 31, 5], data=b"x")
    tracemalloc.start()
    for packed in (bomb, claims):
        with pytest.raises(WireError):
            unpack(packed, (None, 5), "field")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_MESSAGE_BYTES / 16
