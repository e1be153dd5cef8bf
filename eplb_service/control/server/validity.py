"""Validity periods of X.509 certificates in PEM files. The standard library cannot read these periods."""

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
"""A certificate counts as expiring soon only in this final fraction of its lifetime. Otherwise, a certificate that is
renewed daily would count as expiring as soon as it is issued."""


class Validity(NamedTuple):
    """Period in which a certificate is valid.

    Parameters
    ----------
    begins
        Start of the period, in seconds since 1970.
    ends
        End of the period, in seconds since 1970.
    """

    begins: float
    ends: float

    def expires_soon(self, now: float) -> bool:
        """Return True in the last 14 days of the period, or in its last quarter if it is shorter than 56 days.

        Examples
        --------
        >>> day = 86400.0
        >>> Validity(0.0, 365 * day).expires_soon(350 * day)
        False
        >>> Validity(0.0, 365 * day).expires_soon(352 * day)
        True
        >>> Validity(0.0, 1 * day).expires_soon(0.5 * day)
        False
        """
        return self.ends - now < min(_SOON_SECONDS, _SOON_SHARE * (self.ends - self.begins))


def first_to_expire(pem: bytes) -> Validity | None:
    """Return the validity of the certificate in a PEM file that expires first; ``None`` if none can be read."""
    try:
        validities = [
            _validity(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii")))
            for certificate in _CERTIFICATE.findall(pem)
        ]
    except (ValueError, LookupError):
        return None
    return min(validities, key=lambda validity: validity.ends, default=None)


def _validity(der: bytes) -> Validity:
    """Return the validity of a DER certificate: its fourth signed field, not counting the optional version."""
    (_, certificate), *_ = _elements(der)
    (_, signed), *_ = _elements(certificate)
    fields = [content for tag, content in _elements(signed)[:5] if tag != _VERSION]
    begins, ends = (
        datetime.strptime(content.decode("ascii"), _TIMES[tag]).replace(tzinfo=timezone.utc).timestamp()
        for tag, content in _elements(fields[3])
    )
    return Validity(begins, ends)


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and content of each element of a DER sequence.

    Examples
    --------
    An integer (tag 2) of one byte, and a string (tag 12) of two bytes:

    >>> _elements(bytes([2, 1, 65, 12, 2, 111, 107]))
    [(2, b'A'), (12, b'ok')]
    """
    elements = []
    offset = 0
    while offset < len(der):
        tag = der[offset]
        size = der[offset + 1]
        offset += 2
        if size & 0x80:
            octets = size & 0x7F
            size = int.from_bytes(der[offset : offset + octets], "big")
            offset += octets
        elements.append((tag, der[offset : offset + size]))
        offset += size
    return elements
