"""List the TCP ports that this process listens on, and connect to them as a stranger would."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_LISTENING = "0A"
_LINKS = 64


def listening() -> list[tuple[str, int]]:
    """Return the host and port of every IPv4 listener of this process."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()))
    listeners = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == _LISTENING and f"socket:[{inode}]" in inodes:
            host, port = local.split(":")
            listeners.append((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
    return listeners


def knock() -> tuple[int, int]:
    """Connect to every listener several times, sending noise, half a handshake or nothing.

    Return the number of listeners that accepted all connections, and the number that did not.
    """
    closed = 0
    listeners = listening()
    for address in listeners:
        with contextlib.ExitStack() as links:
            for number in range(_LINKS):
                try:
                    link = links.enter_context(socket.create_connection(address, timeout=1))
                    link.sendall(os.urandom((0, 1, 8, 4096)[number % 4]))
                except TimeoutError:
                    closed += 1
                    break
                except OSError:
                    continue
    return len(listeners) - closed, closed
