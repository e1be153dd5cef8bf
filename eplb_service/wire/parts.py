"""Requests of agents that are larger than one message of their stream may be: taken apart, and put together again.

A gRPC message takes memory of its receiver before anybody there knows of it, so messages are small. A large request
comes in parts, each of which says how much is still to come: its receiver makes room for all of it, or refuses, at the
first.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from eplb_service.wire.fields import MOST_BYTES, WireError, check_count
from eplb_service.wire.generated import agent_pb2

PART_BYTES = 128 << 10
"""Data of one part, at most."""
LARGEST_PART = PART_BYTES + 64
"""Bytes of a request that carries one."""


def in_parts(request: agent_pb2.ConnectRequest) -> Iterator[agent_pb2.ConnectRequest]:
    """``request`` itself, or where it is too large for one message, its parts in order."""
    if request.ByteSize() <= PART_BYTES:
        yield request
        return
    whole = request.SerializeToString()
    for begin in range(0, len(whole), PART_BYTES):
        data = whole[begin : begin + PART_BYTES]
        left = len(whole) - begin - len(data)
        yield agent_pb2.ConnectRequest(part=agent_pb2.Part(data=data, bytes_left=left))


class Parts:
    """A request of which the first part has come.

    Parameters
    ----------
    first
        That part.

    ``size`` is what all parts hold, in bytes; ``complete`` says whether they are all here.

    Raises
    ------
    WireError
        The part is empty or too large.
    """

    def __init__(self, first: agent_pb2.Part) -> None:
        self._data = bytearray()
        self.size = len(first.data) + check_count(first.bytes_left, "part.bytes_left", MOST_BYTES)
        self.add(first)

    @property
    def complete(self) -> bool:
        """Whether all parts are here."""
        return len(self._data) == self.size

    def add(self, part: agent_pb2.Part) -> None:
        """The next part; raises ``WireError`` where it cannot be."""
        check_count(len(part.data), "the size of part.data", PART_BYTES + 1, least=1)
        left = self.size - len(self._data) - len(part.data)
        if part.bytes_left != left:
            raise WireError(f"part.bytes_left is {part.bytes_left}; it must be {left}")
        self._data += part.data

    def request(self) -> agent_pb2.ConnectRequest:
        """What the parts make; raises ``WireError`` where that is no request, or a part again."""
        try:
            request = agent_pb2.ConnectRequest.FromString(bytes(self._data))
        except DecodeError as error:
            raise WireError("the parts of a request do not make one") from error
        if request.WhichOneof("message") == "part":
            raise WireError("the parts of a request make another part")
        return request
