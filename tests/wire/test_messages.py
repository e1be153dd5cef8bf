"""Every message comes back as it was sent; whatever is wrong with any field is refused by the field's name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import Placement
from eplb_service.wire.agent import MOST_HEARTBEAT_SECONDS, Heartbeat, Welcome, decode_welcome
from eplb_service.wire.codec import decode, encode, pack
from eplb_service.wire.fields import ProtocolVersionError, WireError, printable
from eplb_service.wire.generated import agent_pb2, operator_pb2, tensor_pb2
from tests.wire.messages import ACCEPTED, KINDS

_INTEGERS = st.integers(0, 130) | st.integers(0, (1 << 64) - 1)
_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    1: st.floats(),
    4: _INTEGERS,
    6: _INTEGERS,
    8: st.booleans(),
    9: st.text(max_size=300),
    12: st.binary(max_size=20),
    13: st.integers(0, 20) | st.integers(0, (1 << 32) - 1),
    14: st.integers(-5, 100),
}
"""Values by protobuf's number of a field's type."""
_SIZES = ("ep_size", "ranks", "layers", "experts", "slots")


def equal(one: Any, other: Any) -> bool:
    """Field by field; arrays by value, whatever integer type they travelled in."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is not None and other is not None and np.array_equal(one, other)
    if isinstance(one, Placement):
        return equal(one.phy2log_LRS, other.phy2log_LRS)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if dataclasses.is_dataclass(one):
        fields = dataclasses.fields(one)
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def paths(message: type[Message], prefix: str = "") -> Iterator[str]:
    """Every field of a message and of those within it, arrays as one."""
    for field in message.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is None or inner.full_name == tensor_pb2.PackedArray.DESCRIPTOR.full_name:
            yield prefix + field.name
        else:
            yield from paths(inner._concrete_class, f"{prefix}{field.name}.")


def assign(message: Message, path: str, value: Any) -> None:
    """Put ``value`` into the field at ``path``, in the first of repeated messages."""
    *within, name = path.split(".")
    owner: Any = message
    for part in within:
        owner = getattr(owner, part)
        owner = owner if isinstance(owner, Message) else owner[0]
    if isinstance(value, Message):
        getattr(owner, name).CopyFrom(value)
    elif isinstance(value, list):
        del getattr(owner, name)[:]
        getattr(owner, name).extend(value)
    else:
        setattr(owner, name, value)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_a_message_comes_back_as_it_was_sent(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    sent = data.draw(kind.values)
    message = kind.message.FromString(kind.encode(sent).SerializeToString())
    assert equal(kind.decode(message), sent)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        (name, path, value)
        for name, kind in KINDS.items()
        for path in paths(kind.message)
        for value in kind.refused(path)
    ],
)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_field_that_cannot_be_is_refused_by_its_name(
    name: str, path: str, value: Any, data: st.DataObject
) -> None:
    kind = KINDS[name]
    whole = kind.values.filter(lambda sent: getattr(sent, path.split(".", maxsplit=1)[0], True) is not None)
    message = kind.encode(data.draw(whole))
    assign(message, path, value)
    with pytest.raises(WireError) as caught:
        kind.decode(message)
    field = path.rsplit(".", maxsplit=1)[-1]
    # Sizes that are each in bounds can contradict one another: then it is the shape that is named.
    named = (field, field.replace("_", " "), "shape" if field in _SIZES else field)
    assert any(name in str(caught.value) for name in named)


def _repeats(field: Any) -> bool:
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)  # protobuf before 6.31


def _drawn(data: st.DataObject, field: Any) -> Any:
    if field.message_type is not None:
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        array = pack(np.full(shape, data.draw(st.integers(-3, 1 << 40)), dtype=np.int64))
        array.shape.extend(data.draw(st.lists(st.integers(0, (1 << 32) - 1), max_size=2)))
        return array
    values = _BY_TYPE[field.type]
    return data.draw(st.lists(values, max_size=5) if _repeats(field) else values)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_whatever_is_in_a_field_ends_in_a_value_or_a_wire_error(name: str, data: st.DataObject) -> None:
    """What is taken can be sent on, and comes back the same."""
    kind, message = KINDS[name], KINDS[name].encode(data.draw(KINDS[name].values))
    for path in data.draw(st.lists(st.sampled_from(sorted(paths(kind.message))), min_size=1, max_size=3)):
        descriptor = kind.message.DESCRIPTOR
        *within, last = path.split(".")
        for part in within:
            descriptor = descriptor.fields_by_name[part].message_type
        assign(message, path, _drawn(data, descriptor.fields_by_name[last]))
    try:
        taken = kind.decode(message)
    except WireError:
        return
    assert equal(kind.decode(kind.encode(taken)), taken)


def test_free_text_is_cleaned_and_cut() -> None:
    assert KINDS["heartbeat"].refused("error") == ACCEPTED
    sent = Heartbeat(error="link\nlost\x1b[31m " + "x" * 300)
    received = decode(Heartbeat, agent_pb2.Heartbeat(error=sent.error))
    assert received.error.startswith("link lost [31m x")
    assert len(received.error) == 256
    assert encode(sent).error == received.error == printable(sent.error)


@pytest.mark.parametrize(
    ("sent", "heard"), [(0.0, 0.05), (-1.0, 0.05), (1e9, 60.0), (float("inf"), 60.0), (2.0, 2.0)]
)
def test_heartbeats_are_neither_a_spin_nor_a_silence(sent: float, heard: float) -> None:
    message = encode(Welcome("1", 1, 16, 2.0))
    message.heartbeat_seconds = sent
    assert decode_welcome(message).heartbeat_seconds == heard <= MOST_HEARTBEAT_SECONDS


def test_another_protocol_version_is_an_error_of_its_own() -> None:
    with pytest.raises(ProtocolVersionError, match="speaks protocol version 7"):
        decode_welcome(agent_pb2.Welcome(protocol_version=7))


def test_every_message_that_carries_values_is_covered() -> None:
    """Those left out are a name, a flag, or lists of others; what is checked of them is beside each."""
    sent = {name for module in (agent_pb2, operator_pb2) for name in module.DESCRIPTOR.message_types_by_name}
    within = {"ModelShape", "PlacementState", "LayerUpdate", "PastVerdict", "RankHeat"}
    within |= {"BalancePoint", "MadeDecision", "LayerMoves", "Worth", "MovePrice"}
    unions = {"ConnectRequest", "ConnectResponse", "WatchHeatResponse"}
    within |= {"Part"}
    lists = {"ListDeploymentsResponse", "GetStatusResponse", "GetHistoryResponse"}
    flags = {"PauseResponse", "ResumeResponse", "ForgetResponse", "LeadResponse", "RebalanceResponse"}
    questions = {name for name in sent if name.endswith("Request")}
    assert sent - within - unions - lists - flags - questions == {
        kind.message.DESCRIPTOR.name for kind in KINDS.values()
    }
    for name in questions - unions:
        fields = set(operator_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name)
        assert fields <= {"deployment", "limit"}
