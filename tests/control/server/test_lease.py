"""One of several services holds a lease; the next has it once it is given back or expires, and knows earlier terms."""

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

NAMESPACE, URL = "serving", "http://kubernetes.example"
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/eplb"


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


def test_one_holds_it_and_the_next_has_it_once_it_is_given_back(rivals: tuple[Lease, Lease]) -> None:
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


def test_a_file_that_is_replaced_is_lost_and_one_that_is_no_lease_refused(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    lease = file_lease(path)
    assert lease.attempt()
    path.rename(tmp_path / "elsewhere")
    path.write_text("not a term")
    assert not lease.attempt()
    lease.give_back()
    other = file_lease(path)
    assert other.attempt()
    with pytest.raises(LeaseError, match="is not a lease file"):
        other.highest_term()
    other.give_back()
    with pytest.raises(LeaseError, match="cannot open"):
        file_lease(tmp_path / "nowhere" / "lease").attempt()


def test_what_a_holder_does_not_renew_expires(candidate: Callable[..., KubernetesLease]) -> None:
    now = [100.0]
    first, second = candidate("a"), candidate("b", lambda: now[0])
    assert first.attempt()
    first.announce(7)
    assert not second.attempt()
    now[0] += 14
    assert first.attempt()
    assert not second.attempt()
    now[0] += 15.1
    assert second.attempt()
    assert second.highest_term() == 7
    assert not first.attempt(), "it has been taken meanwhile"
    with pytest.raises(LeaseError, match="acquired by another"):
        first.announce(8)
    first.give_back()
    assert second.attempt(), "who holds it no longer cannot give it back"


def test_of_two_that_take_it_at_once_one_does(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    first, second = candidate("a"), candidate("b")
    api.before_put = second.attempt
    assert not first.attempt()
    assert api.leases[PATH]["spec"]["holderIdentity"] == "b"
    assert second.attempt()


def test_the_record_is_what_kubernetes_keeps(
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
    # Whatever somebody else has written there.
    record["metadata"]["annotations"] = {TERM_ANNOTATION: "five", "other": "kept"}
    assert lease.attempt()
    assert lease.highest_term() == 0
    assert api.leases[PATH]["metadata"]["annotations"]["other"] == "kept"
    record = api.leases[PATH]
    record["metadata"]["annotations"][TERM_ANNOTATION] = str(1 << 80)
    assert lease.attempt()
    assert lease.highest_term() == MAX_VERSION - 1


def test_the_pod_that_leads_is_labelled_and_no_other(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    paths = {name: f"/api/v1/namespaces/{NAMESPACE}/pods/{name}" for name in ("eplb-a", "eplb-b")}
    first, second = candidate("a", pod="eplb-a"), candidate("b", pod="eplb-b")
    with pytest.raises(LeaseError, match="no pod 'eplb-a'"):
        first.attempt()
    # A container that was restarted finds the label of the one before.
    api.pods = {path: {LEADS_LABEL: "true"} for path in paths.values()}
    assert first.attempt()
    assert not second.attempt()
    assert [api.pods[path][LEADS_LABEL] for path in paths.values()] == ["true", "false"]
    first.give_back()
    assert second.attempt()
    assert [api.pods[path][LEADS_LABEL] for path in paths.values()] == ["false", "true"]


@pytest.mark.parametrize("code", [401, 403, 500])
def test_an_api_server_that_refuses_is_reported(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease], code: int
) -> None:
    api.failing = code
    with pytest.raises(LeaseError, match=f"lease {NAMESPACE}/eplb: the API server answers {code}"):
        candidate("a").attempt()
    candidate("a").give_back()


def test_a_token_that_is_replaced_is_read_again(api: FakeKubernetes, tmp_path: Path) -> None:
    lease = KubernetesLease(api.client(tmp_path), "eplb", "a", 15)
    assert lease.attempt()
    api.token = "the pod's next token"
    with pytest.raises(LeaseError, match="answers 401"):
        lease.attempt()
    (tmp_path / "token").write_text(api.token)
    assert lease.attempt()


def test_a_pod_finds_its_cluster_and_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LeaseError, match="a Kubernetes lease needs a pod"):
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


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eplb_service.control.server.lease.kubernetes_lease")
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(LeaseError, match=r"pip install 'lightkube>=1.0'"):
        named_lease("kubernetes:eplb", 15)


@pytest.mark.parametrize(
    "text", ["eplb", "file:", "kubernetes:", "kubernetes:a/b/c", "kubernetes:Up", "etcd:a"]
)
def test_a_lease_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a lease is file:PATH"):
        checked_lease(text)


async def test_who_cannot_renew_leads_no_longer_before_another_may(
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


async def test_who_finds_another_in_its_place_leads_no_longer(
    api: FakeKubernetes, candidate: Callable[..., KubernetesLease]
) -> None:
    now = [100.0]
    leadership, other = Leadership(candidate("a"), seconds=3), candidate("b", lambda: now[0])
    await asyncio.wait_for(leadership.won(), 20)
    assert not other.attempt()
    now[0] += 100
    assert other.attempt()
    await asyncio.wait_for(leadership.lost.wait(), 30)
    await leadership.close()
    assert api.leases[PATH]["spec"]["holderIdentity"] == "b"


async def test_a_standby_leads_once_the_other_is_gone(tmp_path: Path) -> None:
    first, second = (Leadership(file_lease(tmp_path / "lease"), 3) for _ in range(2))
    await asyncio.wait_for(first.won(), 20)
    waiting = asyncio.create_task(second.won())
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await first.close()
    await asyncio.wait_for(waiting, 20)
    assert not second.lost.is_set()
    await second.close()
