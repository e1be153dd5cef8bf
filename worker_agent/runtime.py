"""Clock, threads and sockets of a rank. A simulation substitutes its own."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any


class Runtime:
    """Clock, threads and sockets of the process. All times are monotonic and in seconds."""

    def now(self) -> float:
        """Return the time in seconds since an arbitrary reference point."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``."""
        time.sleep(seconds)

    def spawn(self, name: str, target: Callable[[], object], *, daemon: bool = True) -> threading.Thread:
        """Start a thread."""
        thread = threading.Thread(target=target, name=name, daemon=daemon)
        thread.start()
        return thread

    def later(self, seconds: float, call: Callable[[], object]) -> threading.Timer:
        """Start a timer that calls ``call`` once on its own thread, unless it is cancelled first."""
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        return timer

    def event(self) -> threading.Event:
        """Create an event that threads can wait for."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """Create a condition variable with its lock."""
        return threading.Condition()

    def queue(self) -> queue.SimpleQueue[Any]:
        """Create an unbounded queue between threads."""
        return queue.SimpleQueue()

    def datagrams(self, family: int) -> socket.socket:
        """Open a datagram socket for an address family."""
        return socket.socket(family, socket.SOCK_DGRAM)


REAL = Runtime()
"""Runtime with the real clock, threads and sockets. It is the default everywhere."""
