"""Large requests come in parts that make the same request, and parts that do not are refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eplb_service.wire.codec import LARGEST_PART, PART_BYTES, Parts, in_parts
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2


def _request(size: int) -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(error="x" * size))


def _part(data: bytes, left: int) -> agent_pb2.Part:
    return agent_pb2.Part(data=data, bytes_left=left)


def _joined(parts: list[agent_pb2.Part]) -> agent_pb2.ConnectRequest:
    joined = Parts(parts[0])
    for part in parts[1:]:
        joined.add(part)
    return joined.request()


@given(st.integers(0, 4 * PART_BYTES))
@example(PART_BYTES - 8)
@example(PART_BYTES - 7)
def test_parts_make_the_request_that_they_were_taken_from(size: int) -> None:
    request = _request(size)
    sent = list(in_parts(request))
    assert all(message.ByteSize() <= LARGEST_PART for message in sent)
    if request.ByteSize() <= PART_BYTES:
        assert sent == [request]
        return
    first, *others = sent
    parts = Parts(first.part)
    assert parts.size == request.ByteSize()
    for other in others:
        assert not parts.complete
        parts.add(other.part)
    assert parts.complete
    assert parts.request() == request


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([_part(b"", 5)], "the size of part.data is 0"),
        ([_part(b"x" * (PART_BYTES + 1), 0)], "the size of part.data is 131073"),
        ([_part(b"x", 1 << 63)], "part.bytes_left is 9223372036854775808"),
        ([_part(b"x", 5), _part(b"x", 5)], "part.bytes_left is 5; it must be 4"),
        ([_part(b"x", 5), _part(b"xx", 2)], "part.bytes_left is 2; it must be 3"),
        ([_part(b"x", 5), _part(b"x" * 7, 0)], "part.bytes_left is 0; it must be -2"),
        ([_part(b"x", 1), _part(b"", 1)], "the size of part.data is 0"),
        ([_part(b"\xff\xff", 0)], "do not make one"),
        ([_part(agent_pb2.ConnectRequest(part=_part(b"x", 0)).SerializeToString(), 0)], "make another part"),
    ],
)
def test_parts_that_make_no_request(parts: list[agent_pb2.Part], says: str) -> None:
    with pytest.raises(WireError, match=says):
        _joined(parts)
