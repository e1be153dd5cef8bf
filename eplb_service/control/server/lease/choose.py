"""The lease that the settings name."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

from eplb_service.control.server.lease.file_lease import FileLease
from eplb_service.control.server.lease.interface import Lease
from eplb_service.control.server.lease.kubernetes_lease import Cluster, KubernetesLease

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(rf"({_LABEL}/)?{_LABEL}")


def checked_lease(text: str) -> str:
    """``text``, if it names a lease; raises ``ValueError``."""
    kind, _, name = text.partition(":")
    if (kind == "file" and name) or (kind == "kubernetes" and _KUBERNETES.fullmatch(name)):
        return text
    raise ValueError(
        "a lease is file:PATH, or kubernetes:NAME or kubernetes:NAMESPACE/NAME, named by small letters, digits and '-'"
    )


def lease_of(text: str, seconds: float) -> Lease:
    """The lease of that name, held for ``seconds`` at a time; raises ``LeaseError`` where there can be none here."""
    kind, _, name = text.partition(":")
    if kind == "file":
        return FileLease(Path(name))
    holder = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    return KubernetesLease(
        Cluster.of_pod(dict(os.environ)), name, holder, seconds, os.environ.get("POD_NAME")
    )
