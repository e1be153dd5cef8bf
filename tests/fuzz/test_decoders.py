"""Tests that arbitrary bytes decode to a message or raise one clear error, within the wire format's memory bound."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.wire.codec import MAX_MESSAGE_BYTES, unpack
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import tensor_pb2
from tests.fuzz.decoders import DECODERS, EDITS, edited, outcome_of


@pytest.mark.parametrize("name", DECODERS)
def test_valid_bytes_are_decoded(name: str) -> None:
    seeds = DECODERS[name].seeds()
    assert seeds
    for data in seeds:
        DECODERS[name].read(data)


@pytest.mark.parametrize("name", DECODERS)
@given(which=st.integers(0, 9), edits=EDITS, noise=st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_and_noise_decode_or_raise_one_clear_error(
    name: str, which: int, edits: list[tuple[str, int, bytes]], noise: bytes
) -> None:
    seeds = DECODERS[name].seeds()
    for data in (edited(seeds[which % len(seeds)], edits), noise):
        outcome_of(DECODERS[name], data)


def test_a_small_message_cannot_allocate_much_memory() -> None:
    """The decoder does not trust the size that a message claims."""
    claims = tensor_pb2.PackedArray(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[1 << 31, 5], data=b"x")
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(claims, (None, 5), "field")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_MESSAGE_BYTES / 16
