"""As much of a Kubernetes API server as leases need: records with versions, and who may write them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eplb_service.control.server.lease.kubernetes_lease import Cluster

TOKEN = "a pod's token"
NAMESPACE = "serving"


class FakeKubernetes:
    """Its leases by path; ``failing`` answers every call while set, ``before_put`` is called before the next PUT."""

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, str]] = {}
        self.failing: int | None = None
        self.before_put: Any = None
        self.writes = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*api.read(self.path))

            def do_POST(self) -> None:
                record = self._body()
                self._answer(*api.write(f"{self.path}/{record['metadata']['name']}", record))

            def do_PUT(self) -> None:
                if api.before_put is not None:
                    act, api.before_put = api.before_put, None
                    act()
                self._answer(*api.write(self.path, self._body()))

            def do_PATCH(self) -> None:
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                self._answer(*api.label(self.path, self._body()["metadata"]["labels"]))

            def _body(self) -> dict[str, Any]:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, code: int, record: dict[str, Any]) -> None:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    code, record = 401, {}
                data = json.dumps(record).encode()
                self.send_response(api.failing or code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._lock = threading.Lock()

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def read(self, path: str) -> tuple[int, dict[str, Any]]:
        with self._lock:
            return (200, self.leases[path]) if path in self.leases else (404, {})

    def label(self, path: str, labels: dict[str, str]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if path not in self.pods:
                return 404, {}
            self.pods[path].update(labels)
            return 200, {"metadata": {"labels": self.pods[path]}}

    def write(self, path: str, record: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            known = self.leases.get(path)
            version = record["metadata"].get("resourceVersion")
            if version != (known["metadata"]["resourceVersion"] if known else None):
                return 409, {"kind": "Status", "reason": "Conflict"}
            self.writes += 1
            metadata = {**record["metadata"], "resourceVersion": str(self.writes)}
            self.leases[path] = {**record, "metadata": metadata}
            return 200, self.leases[path]


@contextmanager
def fake_kubernetes() -> Iterator[FakeKubernetes]:
    api = FakeKubernetes()
    thread = threading.Thread(target=api.serve)
    thread.start()
    try:
        yield api
    finally:
        api.close()
        thread.join()


def cluster_of(api: FakeKubernetes, folder: Path) -> Cluster:
    token = folder / "token"
    token.write_text(TOKEN + "\n")
    return Cluster(api.url, NAMESPACE, token, None)
