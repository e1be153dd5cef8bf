"""A lease stored as a ``coordination.k8s.io/v1`` Lease object, accessed with lightkube (extra ``kubernetes``).

It follows the protocol of client-go's leader election. A candidate acquires or renews the lease by replacing the record
that it has read. The API server rejects the replacement if the record has changed since.
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
from eplb_service.control.server.lease.errors import LeaseError

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
"""Annotation of the Lease object that records the highest leader term."""
LEADS_LABEL = "eplb-service/leads"
"""Pod label that is ``true`` if the pod holds the lease. A Kubernetes Service uses it to select the leading pod."""
_CALL_SECONDS = 5.0
_ABSENT = 404
_CONFLICT = 409

T = TypeVar("T")


def client_of_pod(account: Path = _ACCOUNT) -> Client:
    """Return a client that uses the service account of this process's pod; raises ``LeaseError`` outside a pod.

    Kubernetes replaces the account's token while the pod runs. If the API server rejects the token, the client rereads
    it.
    """
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise LeaseError(
            "a Kubernetes lease works only in a pod, but KUBERNETES_SERVICE_HOST is not set; use --lease file:PATH"
        )
    timeout: Any = _CALL_SECONDS
    try:
        return Client(KubeConfig.from_service_account(account), timeout=timeout, trust_env=False)
    except Exception as error:
        raise LeaseError(
            f"cannot read the pod's service account in {account}: {error}; set automountServiceAccountToken: true"
        ) from error


class KubernetesLease:
    """A ``Lease`` that is stored in a Kubernetes API server.

    Parameters
    ----------
    client
        Client for the API server.
    name
        ``NAME``, for a lease in the client's namespace, or ``NAMESPACE/NAME``.
    holder
        Identity of this service, which must be unique among all services.
    seconds
        How long the lease stays valid without renewal.
    pod
        Name of this service's pod, which is labelled with ``LEADS_LABEL``; ``None`` if no Service selects pods by the
        label.
    clock
        Monotonic clock, in seconds.
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
        self._client = client
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._claim = Claim()
        self._record = Record()
        self._pod = pod
        self._labelled: bool | None = None

    def attempt(self) -> bool:
        """See ``Lease.attempt``. Also fails if the pod cannot be labelled, because ranks could then not reach it."""
        record = self._call(lambda: self._client.get(Record, self._name, namespace=self._namespace))
        if record is None:
            new = Record(metadata=ObjectMeta(name=self._name, namespace=self._namespace), spec=LeaseSpec())
            record = self._call(lambda: self._client.create(new))
        if record is None:
            raise LeaseError(
                f"cannot create {self.described}: its namespace does not exist; "
                "create it, or specify another namespace with --lease"
            )
        self._record = record
        self._claim = self._claim.followed_by(self._clock(), _claim(record))
        held = self._claim.may_be_taken(self._clock(), self._holder)
        held = held and self._write(self._holder, self._seconds, self.highest_term())
        self._label(held)
        return held

    def highest_term(self) -> int:
        """See ``Lease.highest_term``."""
        return _claim(self._record).term

    def announce(self, term: int) -> None:
        """See ``Lease.announce``."""
        held = _claim(self._record).holder == self._holder
        if not (held and self._write(self._holder, self._seconds, term)):
            raise LeaseError(f"{self.described} was acquired by another service")

    def give_back(self) -> None:
        """See ``Lease.give_back``."""
        try:
            self._label(False)
            if _claim(self._record).holder == self._holder:
                # The API server rejects durations below one second.
                self._write("", 1.0, self.highest_term())
        except LeaseError:
            # A lease that is not released expires after its duration.
            return

    def _label(self, leads: bool) -> None:
        pod = self._pod
        if pod is None or leads == self._labelled:
            return
        labels = {"metadata": {"labels": {LEADS_LABEL: str(leads).lower()}}}
        namespace = self._client.namespace
        patched = self._call(
            lambda: self._client.patch(Pod, pod, labels, namespace=namespace, patch_type=PatchType.MERGE)
        )
        if patched is None:
            raise LeaseError(f"{self.described}: cannot label pod {pod!r}: no such pod; correct POD_NAME")
        self._labelled = leads

    def _write(self, holder: str, seconds: float, term: int) -> bool:
        """Replace the record that was read last; return False if it has changed since then."""
        record = copy.deepcopy(self._record)
        spec = record.spec or LeaseSpec()
        now = datetime.now(timezone.utc)
        if holder and spec.holderIdentity != holder:
            spec.acquireTime = now
            spec.leaseTransitions = (spec.leaseTransitions or 0) + 1
        spec.holderIdentity = holder
        spec.renewTime = now
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
        """Return the API server's response; ``None`` if the object does not exist or has changed."""
        try:
            return call()
        except ApiError as error:
            code = error.response.status_code
            if code in (_ABSENT, _CONFLICT):
                return None
            raise LeaseError(f"{self.described}: the API server responded with {code}: {error}") from error
        except Exception as error:
            raise LeaseError(f"{self.described}: the API server does not respond: {error}") from error


def _claim(record: Record) -> Claim:
    """Return the claim stated in a lease record. A malformed leader term counts as 0."""
    spec = record.spec or LeaseSpec()
    metadata = record.metadata or ObjectMeta()
    term = str((metadata.annotations or {}).get(TERM_ANNOTATION, "0"))
    return Claim(
        holder=spec.holderIdentity or "",
        renewed=str(spec.renewTime or ""),
        seconds=float(spec.leaseDurationSeconds or 0),
        term=min(int(term), MAX_VERSION - 1) if term.isdecimal() else 0,
    )
