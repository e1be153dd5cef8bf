"""Guards the agents' links: only hosts of the formation may open them, and nobody once they are open.

gloo listens for as long as a group lives, takes every connection, and holds it: strangers could use up the process's
file descriptors, at which gloo ends the process. Its socket cannot be closed from outside without its event loop
running hot, so a filter on the socket names to the kernel whose connections may reach it. Links that are open already
go on.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_log = logging.getLogger("eplb.agent")

_SO_ATTACH_FILTER = 26
"""Linux's; Python's socket module does not name it."""
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_IP_HEADER = 0x100000000 - 0x100000
"""Offset at which a filter finds the IP header."""
_SOURCE_ADDRESS = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Offset of the sender's address in it."""
_MAX_HOSTS = 400

_Instruction = tuple[int, int, int, int]
_TAKE: _Instruction = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP: _Instruction = (_RETURN, 0, 0, 0)


class LinkGuard:
    """Guards the listening socket of one group that is being opened; on leaving its context nobody gets in any more.

    ``hosts`` gives the addresses from which members of the formation have been heard.
    """

    def __init__(self, hosts: Callable[[], Iterable[str]]) -> None:
        self._hosts = hosts
        self._listening: list[socket.socket] = []

    def __enter__(self) -> LinkGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        found, self._listening = self._listening, []
        for listening in found:
            with listening:
                _attach(listening, [_DROP])
        if not found and kind is None:
            _warn_once("the socket was not found")

    def published(self, value: bytes) -> None:
        """Let in the formation's hosts, and no others, where this process listens at an address in ``value``.

        Called before any other rank can read the value.
        """
        for listening in _listening_at_addresses_in(value):
            self._listening.append(listening)
            admit_only(listening, self._hosts())


def admit_only(listening: socket.socket, hosts: Iterable[str]) -> None:
    """Have the kernel drop what does not come from ``hosts``, or from this one."""
    _attach(listening, _taking(listening.family, hosts))


def _taking(family: int, hosts: Iterable[str]) -> list[_Instruction]:
    """A filter that takes packets of these hosts, and of this one, and drops all others."""
    start = _IP_HEADER + _SOURCE_ADDRESS[socket.AddressFamily(family)]
    addresses = {ipaddress.ip_address(host.partition("%")[0]) for host in (*hosts, "::1")}
    ours = sorted(
        address.packed for address in addresses if (address.version == 4) == (family == socket.AF_INET)
    )
    if len(ours) > _MAX_HOSTS:
        return [_TAKE]
    program = []
    if family == socket.AF_INET:
        # What comes through a proxy on this host has its address from all of 127/8.
        program = [(_LOAD, 0, 0, start), (_AND, 0, 0, 0xFF000000), (_JUMP_IF_EQUAL, 0, 1, 127 << 24), _TAKE]
    for packed in ours:
        words = struct.unpack(f"!{len(packed) // 4}I", packed)
        for number, word in enumerate(words):
            to_next_host = 2 * (len(words) - 1 - number) + 1
            program += [(_LOAD, 0, 0, start + 4 * number), (_JUMP_IF_EQUAL, 0, to_next_host, word)]
        program.append(_TAKE)
    return [*program, _DROP]


def _attach(listening: socket.socket, program: list[_Instruction]) -> None:
    """Have the kernel filter what reaches a socket; where it cannot, that is logged, and everything reaches it."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HL", len(program), ctypes.addressof(held))
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
    except OSError as error:
        _warn_once(f"the kernel takes no filter: {error}")


def _listening_at_addresses_in(value: bytes) -> Iterator[socket.socket]:
    """Duplicate this process's listening socket whose address, as the system writes it, is in ``value``."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        if found.family in _SOURCE_ADDRESS and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = found.getsockname()[:2]
            packed = ipaddress.ip_address(host.partition("%")[0]).packed
            flow = b"" if found.family == socket.AF_INET else bytes(4)
            # The beginning of a ``sockaddr_in`` or ``sockaddr_in6``.
            if struct.pack("=H", found.family) + struct.pack("!H", port) + flow + packed in value:
                yield found
                return
        found.close()


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("gloo's links are open to whoever reaches their ports: %s", reason)
