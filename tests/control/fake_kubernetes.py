"""As much of a Kubernetes API server as leases need: records with versions, and who may write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User

NAMESPACE = "serving"
URL = "http://kubernetes.example"


class FakeKubernetes:
    """Leases and pods by path; ``failing`` answers all calls while set, ``before_put`` runs before the next PUT."""

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, str]] = {}
        self.failing: int | None = None
        self.before_put: Callable[[], object] | None = None
        self.writes = 0
        self.token = "a pod's token"

    def client(self, folder: Path) -> Client:
        """A client whose token is read from a file in ``folder``."""
        token = folder / "token"
        token.write_text(self.token + "\n")
        user = User(token_file=str(token))
        config = KubeConfig.from_one(cluster=Cluster(server=URL), user=user, namespace=NAMESPACE)
        return Client(config, transport=httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if request.headers["Authorization"] != f"Bearer {self.token}":
            code, record = 401, {}
        elif request.method == "GET":
            code, record = (200, self.leases[path]) if path in self.leases else (404, {})
        elif request.method == "PATCH":
            assert request.headers["Content-Type"] == "application/merge-patch+json"
            code, record = self._label(path, body["metadata"]["labels"])
        else:
            if request.method == "PUT" and self.before_put is not None:
                act, self.before_put = self.before_put, None
                act()
            code, record = self._write(
                path if request.method == "PUT" else f"{path}/{body['metadata']['name']}", body
            )
        return httpx2.Response(self.failing or code, json=record or {"kind": "Status", "message": "refused"})

    def _label(self, path: str, labels: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if path not in self.pods:
            return 404, {}
        self.pods[path].update(labels)
        return 200, {"metadata": {"labels": self.pods[path]}}

    def _write(self, path: str, record: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        known = self.leases.get(path)
        version = record["metadata"].get("resourceVersion")
        if version != (known["metadata"]["resourceVersion"] if known else None):
            return 409, {"kind": "Status", "reason": "Conflict"}
        self.writes += 1
        self.leases[path] = {
            **record,
            "metadata": {**record["metadata"], "resourceVersion": str(self.writes)},
        }
        return 200, self.leases[path]
