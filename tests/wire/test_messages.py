"""Tests of every message of the protocol: round trips, and errors that name the invalid field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.wire.agent import MAX_HEARTBEAT_SECONDS, Heartbeat, Welcome, decode_welcome
from eplb_core.wire.codec import decode, encode
from eplb_core.wire.fields import ProtocolVersionError, WireError, printable
from eplb_core.wire.generated import agent_pb2, operator_pb2, tensor_pb2
from tests.fuzz.decoders import EDITS, edited
from tests.wire.messages import ACCEPTED, KINDS, equal

_SIZES = ("ep_size", "ranks", "layers", "experts", "slots")


def paths(message: type[Message], prefix: str = "") -> Iterator[str]:
    """Yield the path of every field of a message and its nested messages. A packed array is one field."""
    for field in message.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is None or inner.full_name == tensor_pb2.PackedArray.DESCRIPTOR.full_name:
            yield prefix + field.name
        else:
            yield from paths(inner._concrete_class, f"{prefix}{field.name}.")


def assign(message: Message, path: str, value: Any) -> None:
    """Set the field at ``path`` to ``value``, in the first item of repeated messages."""
    *parents, name = path.split(".")
    owner: Any = message
    for parent in parents:
        owner = getattr(owner, parent)
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
def test_every_message_survives_a_round_trip(name: str, data: st.DataObject) -> None:
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
        for value in kind.invalid(path)
    ],
)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_an_invalid_field_is_rejected_and_the_error_names_it(
    name: str, path: str, value: Any, data: st.DataObject
) -> None:
    kind = KINDS[name]
    values = kind.values.filter(lambda sent: getattr(sent, path.split(".", maxsplit=1)[0], True) is not None)
    message = kind.encode(data.draw(values))
    assign(message, path, value)
    with pytest.raises(WireError) as caught:
        kind.decode(message)
    field = path.rsplit(".", maxsplit=1)[-1]
    # Sizes within their bounds can still contradict each other. The error then names the shape.
    names = (field, field.replace("_", " "), "shape" if field in _SIZES else field)
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None)
@given(data=st.data(), edits=EDITS)
def test_damaged_bytes_decode_to_a_value_or_raise_a_wire_error(
    name: str, data: st.DataObject, edits: list[tuple[str, int, bytes]]
) -> None:
    """A value decoded from damaged bytes survives a further round trip."""
    kind = KINDS[name]
    intact = kind.encode(data.draw(kind.values)).SerializeToString()
    try:
        decoded = kind.decode(kind.message.FromString(edited(intact, edits)))
    except (WireError, DecodeError):
        return
    assert equal(kind.decode(kind.encode(decoded)), decoded)


def test_free_text_is_cleaned_and_truncated() -> None:
    assert KINDS["heartbeat"].invalid("error") == ACCEPTED
    sent = Heartbeat(error="link\nlost\x1b[31m " + "x" * 300)
    received = decode(Heartbeat, agent_pb2.Heartbeat(error=sent.error))
    assert received.error.startswith("link lost [31m x")
    assert len(received.error) == 256
    assert encode(sent).error == received.error == printable(sent.error)


@pytest.mark.parametrize(
    ("sent", "interval"), [(0.0, 0.05), (-1.0, 0.05), (1e9, 60.0), (float("inf"), 60.0), (2.0, 2.0)]
)
def test_the_heartbeat_interval_is_clamped_to_its_bounds(sent: float, interval: float) -> None:
    message = encode(Welcome("1", 1, 16, 2.0))
    message.heartbeat_seconds = sent
    assert decode_welcome(message).heartbeat_seconds == interval <= MAX_HEARTBEAT_SECONDS


def test_a_different_protocol_version_raises_a_specific_error() -> None:
    with pytest.raises(ProtocolVersionError, match="speaks protocol version 7"):
        decode_welcome(agent_pb2.Welcome(protocol_version=7))


def test_every_message_that_carries_values_is_covered() -> None:
    """The exceptions are nested in other messages, or are only displayed, which ``test_answers`` covers."""
    sent = {name for module in (agent_pb2, operator_pb2) for name in module.DESCRIPTOR.message_types_by_name}
    nested = {"ModelShape", "PlacementState", "LayerUpdate", "RankHeat", "Part"}
    unions = {"ConnectRequest", "ConnectResponse", "WatchHeatResponse"}
    displayed = {"DeploymentStatus", "LayerStatus", "AgentStatus", "PastPlan", "PastVerdict", "BalancePoint"}
    displayed |= {"MadeDecision", "LayerMoves", "Worth", "MovePrice", "Forecast"}
    displayed |= {name for name in sent if name.endswith("Response")} - unions - {"GetPlacementResponse"}
    requests = {name for name in sent if name.endswith("Request")}
    covered = sent - nested - unions - displayed - (requests - {"DecideRequest"})
    assert covered == {kind.message.DESCRIPTOR.name for kind in KINDS.values()}
    for name in requests - unions - {"DecideRequest"}:
        fields = set(operator_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name)
        assert fields <= {"deployment", "limit"}
