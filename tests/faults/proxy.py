"""A TCP proxy between agents and their service that cuts, delays or holds back traffic."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 65536


class Proxy:
    """Proxy that listens on ``address`` and forwards all traffic to ``target`` (host:port).

    ``delay`` is the number of seconds added to each chunk. While ``swallow`` is true, all data is silently held back.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.delay = 0.0
        self.swallow = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections and close the existing ones."""
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all existing connections but keep accepting new ones."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(_CHUNK):
                if self.delay:
                    time.sleep(self.delay)
                while self.swallow:
                    time.sleep(0.02)
                sink.sendall(piece)
        except OSError:
            pass
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
