"""The TCP ports that this process listens on, and a stranger who knocks at them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_LISTENING = "0A"
_LINKS = 64


def listening() -> list[tuple[str, int]]:
    """Host and port of every listener of this process, IPv4."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()))
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == _LISTENING and f"socket:[{inode}]" in inodes:
            host, port = local.split(":")
            found.append((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
    return found


def knock() -> tuple[int, int]:
    """Noise, half a handshake, and links that say nothing, at every listener; how many took them, and how many none."""
    closed, found = 0, listening()
    for address in found:
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
    return len(found) - closed, closed
