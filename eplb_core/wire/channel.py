"""Channels of agents and operators to a service: in plain text or TLS, with or without a certificate of their own."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc

from eplb_core.wire.codec import MAX_MESSAGE_BYTES

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` is reached from this host alone; no name but ``localhost`` is."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Security:
    """Encryption of a channel to a service, by PEM files; raises ``ValueError`` where they do not fit together.

    ``tls_ca`` is the authority that signed the service's certificate, plain text where ``None``; ``tls_cert`` and
    ``tls_key`` the caller's own. With ``plaintext_token`` a token may be sent in plain text to another host.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plaintext_token: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("tls_cert needs tls_ca: without it nothing is encrypted")

    def check_token(self, address: str) -> None:
        """Raise ``ValueError`` where a token for the service at ``address`` could be read on its way."""
        if self.tls_ca is None and not self.plaintext_token and not is_loopback(address):
            raise ValueError(
                f"a token for {address} would be sent in plain text: set tls_ca, or plaintext_token where the network "
                "is trusted"
            )

    def open(self, address: str) -> grpc.Channel:
        """Open a channel to ``address``; its files are read now. Raises ``OSError`` where one cannot be."""
        if self.tls_ca is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        key = None if self.tls_key is None else self.tls_key.read_bytes()
        certificate = None if self.tls_cert is None else self.tls_cert.read_bytes()
        credentials = grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, certificate)
        return grpc.secure_channel(address, credentials, options=_OPTIONS)
