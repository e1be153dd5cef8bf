"""A lease that is a ``coordination.k8s.io/v1`` Lease, kept by plain HTTPS to the cluster's API server.

The protocol is that of client-go's leader election: who takes or renews it replaces the record that was read, and the
server refuses a replacement of one that has changed since.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eplb_service.control.core.claim import Claim, Watched
from eplb_service.control.server.lease.interface import LeaseError
from eplb_service.wire.fields import LAST_VERSION

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, its namespace and the authority of the API server."""
TERM_ANNOTATION = "eplb-service/leader-term"
LEADS_LABEL = "eplb-service/leads"
"""Of the pod that holds the lease, ``true``; a Service selects by it."""

_CALL_SECONDS = 5.0
_LONGEST_ANSWER = 1 << 20
_ABSENT, _CONFLICT = 404, 409


@dataclass(frozen=True)
class Cluster:
    """How the API server is reached.

    Parameters
    ----------
    url
        Such as ``https://10.96.0.1:443``.
    namespace
        Of the lease, where its name has none.
    token
        Read before every call: it is replaced while the pod runs.
    context
        Whom to trust.
    """

    url: str
    namespace: str
    token: Path
    context: ssl.SSLContext | None

    @classmethod
    def of_pod(cls, environment: dict[str, str], account: Path = ACCOUNT) -> Cluster:
        """That of the pod that this process runs in; raises ``LeaseError`` where it is in none."""
        host, port = (
            environment.get("KUBERNETES_SERVICE_HOST"),
            environment.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if not host:
            raise LeaseError(
                "a Kubernetes lease needs a pod: KUBERNETES_SERVICE_HOST is not set; elsewhere use file:PATH"
            )
        try:
            context = ssl.create_default_context(cafile=str(account / "ca.crt"))
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise LeaseError(
                f"cannot read the pod's service account in {account}: {error.strerror}; set "
                "automountServiceAccountToken: true"
            ) from error
        named = f"[{host}]" if ":" in host else host
        return cls(f"https://{named}:{port}", namespace, account / "token", context)


class KubernetesLease:
    """As ``Lease``.

    Parameters
    ----------
    cluster
        Where it is.
    name
        ``NAME`` or ``NAMESPACE/NAME``.
    holder
        This service, unlike every other: a pod's name and something drawn.
    seconds
        Within which a holder renews it.
    pod
        This process's pod, which is labelled by whether it leads; ``None`` where nobody selects by that.
    clock
        Seconds that never jump.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        holder: str,
        seconds: float,
        pod: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace, _, short = name.rpartition("/")
        namespace = namespace or cluster.namespace
        self.described = f"lease {namespace}/{short}"
        self._cluster = cluster
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = short
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._watched = Watched()
        self._record: dict[str, Any] = {}
        self._pod = pod
        self._marked: bool | None = None

    def attempt(self) -> bool:
        """As ``Lease.attempt``; a pod that cannot be labelled does not hold it, for no rank would find it."""
        held = self._taken()
        self._mark(held)
        return held

    def _taken(self) -> bool:
        self._record = self._read()
        self._watched = self._watched.after(self._clock(), _claim(self._record))
        if not self._watched.may_be_taken(self._clock(), self._holder):
            return False
        return self._write(self._holder, self._seconds, self.highest_term())

    def highest_term(self) -> int:
        """As ``Lease.highest_term``."""
        return _claim(self._record).term

    def announce(self, term: int) -> None:
        """As ``Lease.announce``."""
        held = _claim(self._record).holder == self._holder
        if not (held and self._write(self._holder, self._seconds, term)):
            raise LeaseError(f"{self.described} was taken by another service")

    def give_back(self) -> None:
        """As ``Lease.give_back``."""
        try:
            self._mark(False)
            if _claim(self._record).holder == self._holder:
                # The server takes no lease of less than a second.
                self._write("", 1.0, self.highest_term())
        except LeaseError:
            # It expires by itself.
            return

    def _mark(self, leads: bool) -> None:
        if self._pod is None or leads == self._marked:
            return
        labels = {"metadata": {"labels": {LEADS_LABEL: str(leads).lower()}}}
        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{self._pod}"
        if self._call("PATCH", path, labels) is None:
            raise LeaseError(f"{self.described}: there is no pod {self._pod!r} to label; POD_NAME is wrong")
        self._marked = leads

    def _read(self) -> dict[str, Any]:
        found = self._call("GET", f"{self._folder}/{self._name}", None)
        if found is None:
            made = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name},
                "spec": {},
            }
            found = self._call("POST", self._folder, made)
        if found is None:
            raise LeaseError(f"{self.described} can be neither read nor made: its namespace does not exist")
        return found

    def _write(self, holder: str, seconds: float, term: int) -> bool:
        """Replace the record that was read last; whether it had not changed meanwhile."""
        metadata, before = self._record.get("metadata", {}), self._record.get("spec") or {}
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = holder and before.get("holderIdentity") != holder
        spec = {
            **before,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(seconds)),
            "renewTime": now,
            "acquireTime": now if changes else before.get("acquireTime", now),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + bool(changes),
        }
        annotations = {**(metadata.get("annotations") or {}), TERM_ANNOTATION: str(term)}
        record = {**self._record, "metadata": {**metadata, "annotations": annotations}, "spec": spec}
        written = self._call("PUT", f"{self._folder}/{self._name}", record)
        if written is None:
            return False
        self._record = written
        self._watched = self._watched.after(self._clock(), _claim(written))
        return True

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """What the API server answers; ``None`` where there is no such lease, or it has changed."""
        try:
            token = self._cluster.token.read_text(encoding="utf-8").strip()
            request = urllib.request.Request(  # noqa: S310 - https, or a test's
                self._cluster.url + path,
                None if body is None else json.dumps(body).encode(),
                {
                    "Authorization": f"Bearer {token}",
                    "Content-Type": "application/merge-patch+json"
                    if method == "PATCH"
                    else "application/json",
                },
                method=method,
            )
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=_CALL_SECONDS, context=self._cluster.context
            ) as answer:
                found = json.loads(answer.read(_LONGEST_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (_ABSENT, _CONFLICT):
                    return None
                raise LeaseError(
                    f"{self.described}: the API server answers {error.code} {error.reason}"
                ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LeaseError(f"{self.described}: no answer of the API server: {error}") from error
        if not isinstance(found, dict):
            raise LeaseError(f"{self.described}: the API server's answer is no lease")
        return found


def _claim(record: dict[str, Any]) -> Claim:
    """What the record says; what it does not say, or says in another form, counts as not there."""
    spec = record.get("spec") or {}
    annotations = (record.get("metadata") or {}).get("annotations") or {}
    term = str(annotations.get(TERM_ANNOTATION, "0"))
    return Claim(
        holder=str(spec.get("holderIdentity") or ""),
        renewed=str(spec.get("renewTime") or ""),
        seconds=float(spec.get("leaseDurationSeconds") or 0),
        term=min(int(term), LAST_VERSION - 1) if term.isdecimal() else 0,
    )
