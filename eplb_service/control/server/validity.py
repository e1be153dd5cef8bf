"""Validity of X.509 certificates, read from PEM files: the standard library offers no reader of its own."""

from __future__ import annotations

import re
import ssl
from datetime import datetime, timezone
from typing import NamedTuple

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION = 0xA0
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_SOON_SECONDS = 14 * 86400.0
_SOON_SHARE = 0.25
"""Of its whole validity: one that is renewed daily is not about to expire when it is new."""


class Validity(NamedTuple):
    """Seconds since 1970 from which, and until which, a certificate is valid."""

    begins: float
    ends: float

    def expires_soon(self, now: float) -> bool:
        """Return whether it should have been renewed by now."""
        return self.ends - now < min(_SOON_SECONDS, _SOON_SHARE * (self.ends - self.begins))


def first_to_expire(pem: bytes) -> Validity | None:
    """Return the validity of the certificate in a PEM file that expires first; ``None`` where none can be read."""
    try:
        found = [
            _validity(ssl.PEM_cert_to_DER_cert(one.decode("ascii"))) for one in _CERTIFICATE.findall(pem)
        ]
    except (ValueError, LookupError):
        return None
    return min(found, key=lambda one: one.ends, default=None)


def _validity(der: bytes) -> Validity:
    """Validity in a DER certificate: the fourth of the signed fields, of which the first, the version, is optional."""
    (_, certificate), *_ = _elements(der)
    (_, signed), *_ = _elements(certificate)
    fields = [content for tag, content in _elements(signed)[:5] if tag != _VERSION]
    begins, ends = (
        datetime.strptime(content.decode("ascii"), _TIMES[tag]).replace(tzinfo=timezone.utc).timestamp()
        for tag, content in _elements(fields[3])
    )
    return Validity(begins, ends)


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            octets = size & 0x7F
            size, at = int.from_bytes(der[at : at + octets], "big"), at + octets
        found.append((tag, der[at : at + size]))
        at += size
    return found
