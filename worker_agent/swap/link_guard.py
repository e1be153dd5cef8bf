"""Who may open the agents' links: hosts of the formation while links are being opened, and nobody after that.

gloo listens for as long as a group lives, takes every connection, and holds it: strangers could use up the process's
file descriptors, at which gloo ends the process. Its socket cannot be closed from outside without its event loop
running hot, so a filter on the socket names to the kernel whose connections may reach it. Links that are open already
go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

_log = logging.getLogger("eplb.agent")

_SO_ATTACH_FILTER = 26
"""Linux's; Python's socket module does not name it."""
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_IP_HEADER = 0x100000000 - 0x100000
"""Offset at which a filter finds the IP header."""
_SOURCE_ADDRESS = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Offset of the sender's address in it."""
_MOST_HOSTS = 400
_LISTENING = "0A"

_Instruction = tuple[int, int, int, int]
_TAKE: _Instruction = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP: _Instruction = (_RETURN, 0, 0, 0)


class LinkGuard:
    """Guards the listening socket of one group that is being opened; on leaving its context nobody gets in any more.

    Parameters
    ----------
    hosts
        Gives the addresses from which members of the formation have been heard.
    """

    def __init__(self, hosts: Callable[[], Iterable[str]]) -> None:
        self._hosts = hosts
        self._listening: list[socket.socket] = []

    def __enter__(self) -> LinkGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            _attach(listening, _taking(listening.family, self._hosts()))


def _taking(family: int, hosts: Iterable[str]) -> list[_Instruction]:
    """A filter that takes packets of these hosts, and of this one, and drops all others."""
    start = _IP_HEADER + _SOURCE_ADDRESS[socket.AddressFamily(family)]
    addresses = {ipaddress.ip_address(host.partition("%")[0]) for host in (*hosts, "::1")}
    ours = sorted(
        address.packed for address in addresses if (address.version == 4) == (family == socket.AF_INET)
    )
    if len(ours) > _MOST_HOSTS:
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
    """Duplicates of this process's listening sockets whose address, as the system writes it, is in ``value``."""
    inodes = {inode for address, inode in _listeners() if address in value}
    if not inodes:
        return
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()) not in inodes:
                continue
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _as_written(found) in value:
            yield found
            return
        found.close()


def _listeners() -> Iterator[tuple[bytes, str]]:
    """Address and inode of each TCP listener that this process can see, by the kernel's own table."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), Path(f"/proc/self/net/{name}").open() as table:
            next(table, None)
            for line in table:
                _, local, _, state, *_, inode = line.split()[:10]
                # Listeners come first.
                if state != _LISTENING:
                    break
                host, port = local.split(":")
                # The kernel prints the parts of an address as numbers of this machine's.
                words = (int(host[at : at + 8], 16) for at in range(0, len(host), 8))
                packed = b"".join(struct.pack("=I", word) for word in words)
                yield _socket_address(family, packed, int(port, 16)), f"socket:[{inode}]"


def _as_written(listening: socket.socket) -> bytes:
    host, port = listening.getsockname()[:2]
    return _socket_address(listening.family, ipaddress.ip_address(host.partition("%")[0]).packed, port)


def _socket_address(family: int, packed: bytes, port: int) -> bytes:
    """The beginning of a ``sockaddr_in`` or ``sockaddr_in6``."""
    flow = b"" if family == socket.AF_INET else bytes(4)
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + packed


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("gloo's links are open to whoever reaches their ports: %s", reason)
