"""A lease that is a ``coordination.k8s.io/v1`` Lease, by lightkube (the extra ``kubernetes``).

The protocol is that of client-go's leader election: a candidate takes or renews the lease by replacing the record that
it read, and the API server refuses to replace one that has changed since.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from eplb_core.extras import install_command
from eplb_core.wire.fields import MAX_VERSION
from eplb_service.control.core.leader import Claim
from eplb_service.control.server.lease.leadership import LeaseError

try:
    from lightkube import ApiError, Client, KubeConfig
    from lightkube.models.coordination_v1 import LeaseSpec
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.coordination_v1 import Lease as Record
    from lightkube.resources.core_v1 import Pod
    from lightkube.types import PatchType
except ImportError as error:
    raise LeaseError(
        f"a Kubernetes lease needs a package that is not installed ({error}): {install_command('kubernetes')}"
    ) from error

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TERM_ANNOTATION = "eplb-service/leader-term"
LEADS_LABEL = "eplb-service/leads"
"""Of the pod that holds the lease, ``true``; a Service selects by it."""
_CALL_SECONDS = 5.0
_ABSENT, _CONFLICT = 404, 409

T = TypeVar("T")


def client_of_pod(account: Path = _ACCOUNT) -> Client:
    """Return a client with the account of the pod that this process runs in; raises ``LeaseError`` outside of pods.

    Its token is read again when the API server refuses it: it is replaced while the pod runs.
    """
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise LeaseError(
            "a Kubernetes lease needs a pod: KUBERNETES_SERVICE_HOST is not set; elsewhere use file:PATH"
        )
    timeout: Any = _CALL_SECONDS
    try:
        return Client(KubeConfig.from_service_account(account), timeout=timeout, trust_env=False)
    except Exception as error:
        raise LeaseError(
            f"cannot read the pod's service account in {account}: {error}; set automountServiceAccountToken: true"
        ) from error


class KubernetesLease:
    """As ``Lease``: ``NAME``, in the client's namespace, or ``NAMESPACE/NAME``, renewed within ``seconds``.

    ``holder`` is this service, unlike every other. ``pod`` is labelled by whether it leads; ``None`` where nothing
    selects by that. ``clock`` never jumps.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        holder: str,
        seconds: float,
        pod: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace, _, self._name = name.rpartition("/")
        self._namespace = namespace or client.namespace
        self.described = f"lease {self._namespace}/{self._name}"
        self._client, self._holder, self._seconds, self._clock = client, holder, seconds, clock
        self._claim = Claim()
        self._record = Record()
        self._pod = pod
        self._labelled: bool | None = None

    def attempt(self) -> bool:
        """As ``Lease.attempt``; a pod that cannot be labelled does not hold it, for no rank would find it."""
        found = self._call(lambda: self._client.get(Record, self._name, namespace=self._namespace))
        if found is None:
            new = Record(metadata=ObjectMeta(name=self._name, namespace=self._namespace), spec=LeaseSpec())
            found = self._call(lambda: self._client.create(new))
        if found is None:
            raise LeaseError(f"{self.described} can be neither read nor made: its namespace does not exist")
        self._record = found
        self._claim = self._claim.followed_by(self._clock(), _claim(found))
        held = self._claim.may_be_taken(self._clock(), self._holder)
        held = held and self._write(self._holder, self._seconds, self.highest_term())
        self._label(held)
        return held

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
            self._label(False)
            if _claim(self._record).holder == self._holder:
                # The server takes no lease of less than a second.
                self._write("", 1.0, self.highest_term())
        except LeaseError:
            # It expires by itself.
            return

    def _label(self, leads: bool) -> None:
        pod = self._pod
        if pod is None or leads == self._labelled:
            return
        labels = {"metadata": {"labels": {LEADS_LABEL: str(leads).lower()}}}
        namespace, kind = self._client.namespace, PatchType.MERGE
        if (
            self._call(lambda: self._client.patch(Pod, pod, labels, namespace=namespace, patch_type=kind))
            is None
        ):
            raise LeaseError(f"{self.described}: there is no pod {pod!r} to label; POD_NAME is wrong")
        self._labelled = leads

    def _write(self, holder: str, seconds: float, term: int) -> bool:
        """Replace the record that was read last; returns whether it had not changed meanwhile."""
        record = copy.deepcopy(self._record)
        spec, now = record.spec or LeaseSpec(), datetime.now(timezone.utc)
        if holder and spec.holderIdentity != holder:
            spec.acquireTime, spec.leaseTransitions = now, (spec.leaseTransitions or 0) + 1
        spec.holderIdentity, spec.renewTime = holder, now
        spec.leaseDurationSeconds = max(1, round(seconds))
        record.spec = spec
        assert record.metadata is not None
        record.metadata.annotations = {**(record.metadata.annotations or {}), TERM_ANNOTATION: str(term)}
        written = self._call(lambda: self._client.replace(record))
        if written is None:
            return False
        self._record = written
        self._claim = self._claim.followed_by(self._clock(), _claim(written))
        return True

    def _call(self, call: Callable[[], T]) -> T | None:
        """Return the API server's answer; ``None`` where there is no such object, or it has changed."""
        try:
            return call()
        except ApiError as error:
            code = error.response.status_code
            if code in (_ABSENT, _CONFLICT):
                return None
            raise LeaseError(f"{self.described}: the API server answers {code} {error}") from error
        except Exception as error:
            raise LeaseError(f"{self.described}: no answer of the API server: {error}") from error


def _claim(record: Record) -> Claim:
    """Return what the record claims; a term of another form counts as none."""
    spec, metadata = record.spec or LeaseSpec(), record.metadata or ObjectMeta()
    term = str((metadata.annotations or {}).get(TERM_ANNOTATION, "0"))
    return Claim(
        holder=spec.holderIdentity or "",
        renewed=str(spec.renewTime or ""),
        seconds=float(spec.leaseDurationSeconds or 0),
        term=min(int(term), MAX_VERSION - 1) if term.isdecimal() else 0,
    )
