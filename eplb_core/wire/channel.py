"""gRPC channels from agents and operators to a service, in plain text or with TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc

from eplb_core.wire.codec import MAX_MESSAGE_BYTES

DEFAULT_ADDRESS = "127.0.0.1:50551"
"""Address on which a service listens for agents and operators by default."""
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def is_loopback(address: str) -> bool:
    """Return True if ``host:port`` is a loopback address. The only host name that counts as one is ``localhost``.

    Examples
    --------
    >>> is_loopback("127.0.0.1:50051"), is_loopback("[::1]:50051"), is_loopback("eplb.example:50051")
    (True, True, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Security:
    """Encryption and authentication of a channel to a service.

    Parameters
    ----------
    tls_ca
        PEM file of the authority that signed the service's certificate; ``None`` to connect in plain text.
    tls_cert
        PEM file of the caller's certificate, for mutual TLS.
    tls_key
        PEM file of the certificate's key.
    plaintext_token
        True to allow sending tokens to remote hosts in plain text.

    Raises
    ------
    ValueError
        If only one of ``tls_cert`` and ``tls_key`` is set, or if both are set but ``tls_ca`` is not.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plaintext_token: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError(
                "tls_cert is set, but without tls_ca the channel is not encrypted; set tls_ca too"
            )

    def check_token(self, address: str) -> None:
        """Raise ``ValueError`` if a token would be sent to a remote ``address`` in plain text without permission."""
        if self.tls_ca is None and not self.plaintext_token and not is_loopback(address):
            raise ValueError(
                f"a token for {address} would be sent in plain text; set tls_ca, or set plaintext_token if the network "
                "is trusted"
            )

    def open(self, address: str) -> grpc.Channel:
        """Open a channel to ``address``; raises ``OSError`` if a PEM file cannot be read."""
        if self.tls_ca is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        key = None if self.tls_key is None else self.tls_key.read_bytes()
        certificate = None if self.tls_cert is None else self.tls_cert.read_bytes()
        credentials = grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, certificate)
        return grpc.secure_channel(address, credentials, options=_OPTIONS)
