"""Bytes from anywhere end in a message or in one clear error, and never take more memory than the wire's bound."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.control.heat_report import read_heat_report
from eplb_service.control.hello import Shape, read_hello
from eplb_service.control.refusal import RefusedError
from eplb_service.wire.codec import MAX_MESSAGE_BYTES, WireError, pack, unpack
from eplb_service.wire.generated import agent_pb2, tensor_pb2
from eplb_service.wire.plan_codec import encode_plan
from tests.swap.world import EXPERTS, LAYERS, LINEAR, RANKS, SLOTS, World
from worker_agent.history.check import HistoryError, read_histories, violations
from worker_agent.identity import Identity
from worker_agent.messages import checked_plan, hello
from worker_agent.swap.ballot import BALLOT_WIDTH, Outcome
from worker_agent.swap.installed import Installed

IDENTITY = Identity("default", "group", 1, RANKS, "here", (0, 1, 2), LAYERS, EXPERTS, SLOTS, 64)
INSTALLED = Installed.first(1, LINEAR, LINEAR.default_log2phy()[1])
SHAPE = Shape(RANKS, LAYERS, EXPERTS, SLOTS, 64)
CLEAR = (WireError, RefusedError, DecodeError)


def _plan() -> bytes:
    return encode_plan(World().plan(1, [(0, 0), (1, 0)])[1]).SerializeToString()


def _hello() -> bytes:
    return hello(IDENTITY, INSTALLED).SerializeToString()


def _heat() -> bytes:
    counts = pack(np.arange(4 * LAYERS * SLOTS, dtype=np.int32).reshape(4, LAYERS, SLOTS))
    message = agent_pb2.HeatReport(
        first_step=3, layer_epochs=[0] * LAYERS, slot_counts=counts, step_phases=b"\x01\x02\x03\x02"
    )
    return message.SerializeToString()


def _read_plan(data: bytes) -> None:
    checked_plan(agent_pb2.Plan.FromString(data), IDENTITY, INSTALLED)


def _read_hello(data: bytes) -> None:
    read_hello(agent_pb2.Hello.FromString(data))


def _read_heat(data: bytes) -> None:
    read_heat_report(agent_pb2.HeatReport.FromString(data), SHAPE, 64)


DECODERS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "plan": (_plan(), _read_plan),
    "hello": (_hello(), _read_hello),
    "heat report": (_heat(), _read_heat),
}
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]), st.integers(0, 1 << 16), st.binary(max_size=8)
    ),
    min_size=1,
    max_size=6,
)


def _told_clearly(read: Callable[[Any], Any], data: Any, errors: tuple[type[Exception], ...] = CLEAR) -> str:
    """What was wrong in words, "" where nothing was; any other error is a defect of the decoder."""
    told = ""
    try:
        read(data)
    except errors as error:
        told = str(error)
        if not told:
            raise
    return told


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
def test_undamaged_messages_are_read(name: str) -> None:
    data, read = DECODERS[name]
    read(data)


@pytest.mark.parametrize("name", DECODERS)
@given(edits=EDITS)
@settings(max_examples=150, deadline=None)
def test_damaged_messages_end_in_one_clear_error(name: str, edits: list[tuple[str, int, bytes]]) -> None:
    data, read = DECODERS[name]
    _told_clearly(read, edited(data, edits))


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_ends_in_one_clear_error(name: str, data: bytes) -> None:
    _told_clearly(DECODERS[name][1], data)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from([0, 1, 2, 3, 4, 99]),
    "shape": st.lists(st.integers(0, 2**32 - 1), max_size=4),
    "compression": st.sampled_from([0, 1, 7]),
    "data": st.binary(max_size=64),
}


@given(st.fixed_dictionaries(FIELDS))
@settings(max_examples=300, deadline=None)
def test_an_array_that_lies_about_itself_is_refused(fields: dict[str, Any]) -> None:
    packed = tensor_pb2.PackedArray(**fields)
    read: list[Any] = []
    told = _told_clearly(lambda one: read.append(unpack(one, (None, 5), "field")), packed)
    assert told.startswith("field: ") or (read[0].dtype, read[0].shape[1]) == (np.int32, 5)


def test_a_small_message_can_not_take_much_memory() -> None:
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


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2 * BALLOT_WIDTH))
def test_a_reduced_ballot_is_read_or_refused(words: list[int]) -> None:
    _told_clearly(lambda reduced: Outcome.decode(reduced).decision, words, (ValueError,))


@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_a_damaged_history_is_refused_by_name(
    data: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("history")
    start = {
        "kind": "start",
        "rank": 0,
        "ranks": 1,
        "group": "g",
        "epoch": 0,
        "digest": 1,
        "layer_epochs": [0],
    }
    text = json.dumps(start).encode() + b"\n" + data[:cut] + b"\n"
    Path(folder / "rank-0-g.jsonl").write_bytes(text)

    def check(where: Path) -> None:
        for ranks in read_histories(where).values():
            list(violations(ranks))

    told = _told_clearly(check, folder, (HistoryError,))
    assert not told or "rank" in told
