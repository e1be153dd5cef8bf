"""Every message comes back as it was sent; whatever is wrong with any field is refused by the field's name."""

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


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None)
@given(data=st.data(), edits=EDITS)
def test_damaged_bytes_end_in_a_value_or_a_wire_error(
    name: str, data: st.DataObject, edits: list[tuple[str, int, bytes]]
) -> None:
    """What is taken can be sent on, and comes back the same."""
    kind = KINDS[name]
    whole = kind.encode(data.draw(kind.values)).SerializeToString()
    try:
        taken = kind.decode(kind.message.FromString(edited(whole, edits)))
    except (WireError, DecodeError):
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
    assert decode_welcome(message).heartbeat_seconds == heard <= MAX_HEARTBEAT_SECONDS


def test_another_protocol_version_is_an_error_of_its_own() -> None:
    with pytest.raises(ProtocolVersionError, match="speaks protocol version 7"):
        decode_welcome(agent_pb2.Welcome(protocol_version=7))


def test_every_message_that_carries_values_is_covered() -> None:
    """Those left out are parts of others, or only shown, as ``test_answers`` holds them to."""
    sent = {name for module in (agent_pb2, operator_pb2) for name in module.DESCRIPTOR.message_types_by_name}
    within = {"ModelShape", "PlacementState", "LayerUpdate", "RankHeat", "Part"}
    unions = {"ConnectRequest", "ConnectResponse", "WatchHeatResponse"}
    shown = {"DeploymentStatus", "LayerStatus", "AgentStatus", "PastPlan", "PastVerdict", "BalancePoint"}
    shown |= {"MadeDecision", "LayerMoves", "Worth", "MovePrice", "Forecast"}
    shown |= {name for name in sent if name.endswith("Response")} - unions - {"GetPlacementResponse"}
    questions = {name for name in sent if name.endswith("Request")}
    assert sent - within - unions - shown - questions == {
        kind.message.DESCRIPTOR.name for kind in KINDS.values()
    }
    for name in questions - unions:
        fields = set(operator_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name)
        assert fields <= {"deployment", "limit"}
