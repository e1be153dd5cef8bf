"""Clock, threads and sockets of a rank, in one place, so that a simulation can put others in theirs."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any


class Runtime:
    """Clock, threads and sockets of the process; times are seconds by a clock that never goes back."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for so long."""
        time.sleep(seconds)

    def spawn(self, name: str, target: Callable[[], object], *, daemon: bool = True) -> threading.Thread:
        """Begin a thread."""
        thread = threading.Thread(target=target, name=name, daemon=daemon)
        thread.start()
        return thread

    def later(self, seconds: float, call: Callable[[], object]) -> threading.Timer:
        """Begin a timer that calls once, on a thread of its own, unless it is cancelled."""
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        return timer

    def event(self) -> threading.Event:
        """Make a flag that threads wait for."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """Make a lock that threads wait with."""
        return threading.Condition()

    def queue(self) -> queue.SimpleQueue[Any]:
        """Make a queue that a thread waits at."""
        return queue.SimpleQueue()

    def datagrams(self, family: int) -> socket.socket:
        """Open a socket for datagrams."""
        return socket.socket(family, socket.SOCK_DGRAM)


REAL = Runtime()
"""The process's own, wherever none is given."""
