"""Guards the agents' listening sockets: only the formation's hosts may connect, and only until the links are open.

gloo listens for as long as a group exists, and accepts and keeps every connection. A stranger could therefore exhaust
the process's file descriptors, at which point gloo terminates the process. Closing gloo's socket from outside would
make its event loop spin. Instead, a filter on the socket makes the kernel drop packets from other hosts. Open links are
not affected.
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
"""Linux socket option that Python's ``socket`` module does not define."""
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
"""Classic BPF opcodes."""
_IP_HEADER = 0x100000000 - 0x100000
"""Offset through which a filter accesses the IP header."""
_SOURCE_ADDRESS = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Offset of the source address in the IP header."""
_MAX_HOSTS = 400
"""Maximum number of hosts in a filter. A group with more hosts admits every host."""

_Instruction = tuple[int, int, int, int]
"""Opcode, jump offset if true, jump offset if false, operand."""
_ACCEPT: _Instruction = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP: _Instruction = (_RETURN, 0, 0, 0)


class LinkGuard:
    """Context manager that guards a gloo group's listening socket while the group opens its links.

    On exit, the socket accepts no further connections.

    Parameters
    ----------
    hosts
        Callable that returns the source addresses of messages from members of the formation.
    """

    def __init__(self, hosts: Callable[[], Iterable[str]]) -> None:
        self._hosts = hosts
        self._listening: list[socket.socket] = []

    def __enter__(self) -> LinkGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        guarded = self._listening
        self._listening = []
        for listening in guarded:
            with listening:
                _attach(listening, [_DROP])
        if not guarded and kind is None:
            _warn_once("gloo's listening socket was not found")

    def published(self, value: bytes) -> None:
        """Restrict the socket that is listening on an address in ``value`` to the formation's hosts.

        Call this before any other rank can read ``value``.
        """
        for listening in _listening_at_addresses_in(value):
            self._listening.append(listening)
            admit_only(listening, self._hosts())


def admit_only(listening: socket.socket, hosts: Iterable[str]) -> None:
    """Make the kernel drop all packets to a socket except those from ``hosts`` and from this host."""
    _attach(listening, _filter_program(listening.family, hosts))


def _filter_program(family: int, hosts: Iterable[str]) -> list[_Instruction]:
    """Return a filter that accepts packets from ``hosts`` and from this host, and drops all others."""
    start = _IP_HEADER + _SOURCE_ADDRESS[socket.AddressFamily(family)]
    addresses = {ipaddress.ip_address(host.partition("%")[0]) for host in (*hosts, "::1")}
    admitted = sorted(
        address.packed for address in addresses if (address.version == 4) == (family == socket.AF_INET)
    )
    if len(admitted) > _MAX_HOSTS:
        return [_ACCEPT]
    program = []
    if family == socket.AF_INET:
        # A proxy on this host may connect from any address in 127/8.
        program = [(_LOAD, 0, 0, start), (_AND, 0, 0, 0xFF000000), (_JUMP_IF_EQUAL, 0, 1, 127 << 24), _ACCEPT]
    for packed in admitted:
        operands = struct.unpack(f"!{len(packed) // 4}I", packed)
        for number, operand in enumerate(operands):
            to_next_host = 2 * (len(operands) - 1 - number) + 1
            program += [(_LOAD, 0, 0, start + 4 * number), (_JUMP_IF_EQUAL, 0, to_next_host, operand)]
        program.append(_ACCEPT)
    return [*program, _DROP]


def _attach(listening: socket.socket, program: list[_Instruction]) -> None:
    """Attach a filter to a socket. If the kernel rejects it, log a warning and leave the socket open to all hosts."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    sock_fprog = struct.pack("HL", len(program), ctypes.addressof(buffer))
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, sock_fprog)
    except OSError as error:
        _warn_once(f"the kernel rejected the filter: {error}")


def _listening_at_addresses_in(value: bytes) -> Iterator[socket.socket]:
    """Yield a duplicate of this process's listening socket whose ``sockaddr`` appears in ``value``, if any."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        if duplicate.family in _SOURCE_ADDRESS and duplicate.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            host, port = duplicate.getsockname()[:2]
            packed = ipaddress.ip_address(host.partition("%")[0]).packed
            flow = b"" if duplicate.family == socket.AF_INET else bytes(4)
            # This is the beginning of a ``sockaddr_in`` or ``sockaddr_in6``.
            if struct.pack("=H", duplicate.family) + struct.pack("!H", port) + flow + packed in value:
                yield duplicate
                return
        duplicate.close()


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("gloo accepts connections from any host that reaches its ports: %s", reason)
