"""Only one of several services holds a lease at a time.

Once the lease is released or expires, another service can acquire it and learns the highest term.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User

from eplb_core.wire.fields import MAX_VERSION
from eplb_service.control.server.lease.errors import LeaseError
from eplb_service.control.server.lease.kubernetes_lease import (
    LEADS_LABEL,
    TERM_ANNOTATION,
    KubernetesLease,
    client_of_pod,
)
from eplb_service.control.server.lease.leadership import (
    Leadership,
    Lease,
    checked_lease,
    named_lease,
)
from tests.control.server.certificates import Authority

NAMESPACE = "serving"
URL = "http://kubernetes.example"
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/eplb"


class FakeKubernetes:
    """A fake API server that stores leases and pods by path.

    While ``failing`` is set, all calls return it as their status code. ``before_put`` runs once, before the next PUT.
    """

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, str]] = {}
        self.failing: int | None = None
        self.before_put: Callable[[], object] | None = None
        self.writes = 0
        self.token = "a pod's token"

    def client(self, folder: Path) -> Client:
        """Return a client that reads its token from a file in ``folder``."""
        token = folder / "token"
        token.write_text(self.token + "\n")
        user = User(token_file=str(token))
        config = KubeConfig.from_one(cluster=Cluster(server=URL), user=user, namespace=NAMESPACE)
        return Client(config, transport=httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        body = json.loads(request.content or b"{}")
        if request.headers["Authorization"] != f"Bearer {self.token}":
            code = 401
            record = {}
        elif request.method == "GET":
            code, record = (200, self.leases[path]) if path in self.leases else (404, {})
        elif request.method == "PATCH":
            assert request.headers["Content-Type"] == "application/merge-patch+json"
            code, record = self._label(path, body["metadata"]["labels"])
        else:
            if request.method == "PUT" and self.before_put is not None:
                act = self.before_put
                self.before_put = None
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
        stored = self.leases.get(path)
        version = record["metadata"].get("resourceVersion")
        if version != (stored["metadata"]["resourceVersion"] if stored else None):
            return 409, {"kind": "Status", "reason": "Conflict"}
        self.writes += 1
        self.leases[path] = {
            **record,
            "metadata": {**record["metadata"], "resourceVersion": str(self.writes)},
        }
        return 200, self.leases[path]


def file_lease(path: Path) -> Lease:
    return named_lease(f"file:{path}", 15)


@pytest.fixture
def api() -> FakeKubernetes:
    return FakeKubernetes()


@pytest.fixture
def candidate(api: FakeKubernetes, tmp_path: Path) -> Callable[..., KubernetesLease]:
    client = api.client(tmp_path)
    return lambda holder, clock=None, pod=None: KubernetesLease(
        client, "eplb", holder, 15, pod, clock or (lambda: 100.0)
    )


@pytest.fixture(params=["file", "kubernetes"])
def rivals(
    request: pytest.FixtureRequest, tmp_path: Path, candidate: Callable[..., KubernetesLease]
) -> tuple[Lease, Lease]:
    if request.param == "file":
        return file_lease(tmp_path / "lease"), file_lease(tmp_path / "lease")
    return candidate("a"), candidate("b")


def test_a_lease_has_one_holder_and_can_be_acquired_after_its_release(rivals: tuple[Lease, Lease]) -> None:
    first, second = rivals
    assert [lease.attempt() for lease in (first, second) * 2] == [True, False, True, False]
    assert first.highest_term() == 0
    first.announce(41)
    assert not second.attempt()
    assert first.attempt()
    first.give_back()
    assert second.attempt()
    assert second.highest_term() == 41
    second.announce(42)
    second.give_back()
    first.give_back()
    assert first.attempt()
    assert first.highest_term() == 42
    first.give_back()


def test_a_lease_is_lost_if_its_file_is_replaced_and_a_file_without_a_term_is_rejected(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lease"
    lease = file_lease(path)
    assert lease.attempt()
    path.rename(tmp_path / "elsewhere")
    path.write_text("not a term")
    assert not lease.attempt()
    lease.give_back()
    new_lease = file_lease(path)
    assert new_lease.attempt()
    with pytest.raises(LeaseError, match="is not a lease file"):
        new_lease.highest_term()
    new_lease.give_back()
    with pytest.raises(LeaseError, match="cannot open"):
        file_lease(tmp_path / "nowhere" / "lease").attempt()


def test_a_lease_that_is_not_renewed_expires(candidate: Callable[..., KubernetesLease]) -> None:
    now = [100.0]
    first = candidate("a")
    second = candidate("b", lambda: now[0])
    assert first.attempt()
    first.announce(7)
    assert not second.attempt()
    now[0] += 14
    assert first.attempt()
    assert not second.attempt()
    now[0] += 15.1
    assert second.attempt()
    assert second.highest_term() == 7
    assert not first.attempt(), "another service has acquired the lease in the meantime"
    with pytest.raises(LeaseError, match="acquired by another"):
        first.announce(8)
    first.give_back()
    assert second.attempt(), "a former holder cannot release the lease"


def test_only_one_of_two_concurrent_attempts_acquires_the_lease(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    first = candidate("a")
    second = candidate("b")
    api.before_put = second.attempt
    assert not first.attempt()
    assert api.leases[PATH]["spec"]["holderIdentity"] == "b"
    assert second.attempt()


def test_the_kubernetes_record_has_the_standard_fields_and_keeps_foreign_annotations(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    lease = candidate("a")
    assert lease.attempt()
    assert lease.attempt()
    lease.announce(5)
    record = api.leases[PATH]
    assert (record["apiVersion"], record["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert record["metadata"]["annotations"] == {TERM_ANNOTATION: "5"}
    assert record["spec"]["leaseDurationSeconds"] == 15
    assert record["spec"]["leaseTransitions"] == 1
    assert record["spec"]["acquireTime"] < record["spec"]["renewTime"]
    # A different client may have written anything to the record.
    record["metadata"]["annotations"] = {TERM_ANNOTATION: "five", "other": "kept"}
    assert lease.attempt()
    assert lease.highest_term() == 0
    assert api.leases[PATH]["metadata"]["annotations"]["other"] == "kept"
    record = api.leases[PATH]
    record["metadata"]["annotations"][TERM_ANNOTATION] = str(1 << 80)
    assert lease.attempt()
    assert lease.highest_term() == MAX_VERSION - 1


def test_only_the_leading_pod_is_labelled(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    paths = {name: f"/api/v1/namespaces/{NAMESPACE}/pods/{name}" for name in ("eplb-a", "eplb-b")}
    first = candidate("a", pod="eplb-a")
    second = candidate("b", pod="eplb-b")
    with pytest.raises(LeaseError, match="cannot label pod 'eplb-a'"):
        first.attempt()
    # A restarted container finds its predecessor's label.
    api.pods = {path: {LEADS_LABEL: "true"} for path in paths.values()}
    assert first.attempt()
    assert not second.attempt()
    assert [api.pods[path][LEADS_LABEL] for path in paths.values()] == ["true", "false"]
    first.give_back()
    assert second.attempt()
    assert [api.pods[path][LEADS_LABEL] for path in paths.values()] == ["false", "true"]


@pytest.mark.parametrize("code", [401, 403, 500])
def test_api_server_errors_are_reported(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease], code: int
) -> None:
    api.failing = code
    with pytest.raises(LeaseError, match=f"lease {NAMESPACE}/eplb: the API server responded with {code}"):
        candidate("a").attempt()
    candidate("a").give_back()


def test_a_replaced_token_is_read_again(api: FakeKubernetes, tmp_path: Path) -> None:
    lease = KubernetesLease(api.client(tmp_path), "eplb", "a", 15)
    assert lease.attempt()
    api.token = "the pod's next token"
    with pytest.raises(LeaseError, match="responded with 401"):
        lease.attempt()
    (tmp_path / "token").write_text(api.token)
    assert lease.attempt()


def test_only_a_pod_gets_a_client_for_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LeaseError, match="a Kubernetes lease works only in a pod"):
        client_of_pod()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(LeaseError, match="automountServiceAccountToken"):
        client_of_pod(tmp_path / "nowhere")
    Authority(tmp_path).ca.rename(tmp_path / "ca.crt")
    (tmp_path / "namespace").write_text(NAMESPACE)
    (tmp_path / "token").write_text("a token")
    client = client_of_pod(tmp_path)
    assert (client.config.cluster.server, client.namespace) == ("https://[fd00::1]:6443", NAMESPACE)


def test_an_error_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eplb_service.control.server.lease.kubernetes_lease")
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(LeaseError, match=r"pip install 'lightkube>=1.0'"):
        named_lease("kubernetes:eplb", 15)


@pytest.mark.parametrize(
    "text", ["eplb", "file:", "kubernetes:", "kubernetes:a/b/c", "kubernetes:Up", "etcd:a"]
)
def test_an_invalid_lease_name_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected file:PATH"):
        checked_lease(text)


async def test_a_leader_that_cannot_renew_stops_before_the_lease_expires(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    leadership = Leadership(candidate("a"), seconds=1.2)
    await asyncio.wait_for(leadership.won(), 20)
    await leadership.announce(9)
    api.failing = 500
    await asyncio.wait_for(leadership.lost.wait(), 20)
    api.failing = None
    await leadership.close()
    assert api.leases[PATH]["metadata"]["annotations"][TERM_ANNOTATION] == "9"


async def test_a_leader_stops_once_a_rival_acquires_the_lease(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    now = [100.0]
    leadership = Leadership(candidate("a"), seconds=3)
    rival = candidate("b", lambda: now[0])
    await asyncio.wait_for(leadership.won(), 20)
    assert not rival.attempt()
    now[0] += 100
    assert rival.attempt()
    await asyncio.wait_for(leadership.lost.wait(), 30)
    await leadership.close()
    assert api.leases[PATH]["spec"]["holderIdentity"] == "b"


async def test_a_standby_leads_once_the_leader_is_gone(tmp_path: Path) -> None:
    first, second = (Leadership(file_lease(tmp_path / "lease"), 3) for _ in range(2))
    await asyncio.wait_for(first.won(), 20)
    waiting = asyncio.create_task(second.won())
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await first.close()
    await asyncio.wait_for(waiting, 20)
    assert not second.lost.is_set()
    await second.close()
