"""The certificate that the service shows, read again when its files change: it is renewed without a restart.

A renewal replaces certificate and key one after the other. Until both belong together again, the pair before is shown.
"""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

import grpc
import structlog

from eplb_service.control.server.settings import SettingsError

_log = structlog.get_logger(__name__)


class Certificates:
    """PEM files of the service's listeners; used from any thread.

    Parameters
    ----------
    certificate, key
        The service's own.
    client_authority
        Who signs client certificates; ``None`` where none are asked for.

    Raises
    ------
    SettingsError
        A file cannot be read or used, or the key is another certificate's.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._certificate, self._key, self._client_authority = certificate, key, client_authority
        self._lock = threading.Lock()
        self._contents = self._read()
        self._context = self._usable(self._contents)
        self._complaint: str | None = None
        self._shown = self._contents

    def context(self) -> ssl.SSLContext:
        """What a new connection over HTTP is shown."""
        with self._lock:
            self._refresh()
            return self._context

    def current(self) -> grpc.ServerCertificateConfiguration:
        """What new connections over gRPC are shown."""
        with self._lock:
            self._shown = self._contents
            key, certificate, *authority = self._contents
            return grpc.ssl_server_certificate_configuration([(key, certificate)], *authority)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What to show from now on, or ``None`` where it is the same; asked by gRPC at each handshake."""
        with self._lock:
            self._refresh()
            same = self._shown == self._contents
        return None if same else self.current()

    def _refresh(self) -> None:
        """Take over the files as they are now, where they can be used; else say so once, and keep those before."""
        try:
            contents = self._read()
            if contents != self._contents:
                self._context = self._usable(contents)
                self._contents = contents
            self._complaint = None
        except SettingsError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("certificate_not_renewed", reason=self._complaint, shown="the one before")

    def _usable(self, contents: tuple[bytes, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # No password: a key that needs one is refused, not asked for on a terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
            if self._client_authority is not None:
                context.load_verify_locations(self._client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            if reason == "KEY_VALUES_MISMATCH":
                raise SettingsError(
                    f"{self._key} is not the key of the certificate in {self._certificate}"
                ) from error
            paths = ", ".join(str(path) for path in self._paths)
            raise SettingsError(f"the TLS files {paths} cannot be used: {reason}") from error
        if self._read() != contents:
            raise SettingsError("the TLS files are being replaced")
        return context

    @property
    def _paths(self) -> tuple[Path, ...]:
        own = (self._key, self._certificate)
        return own if self._client_authority is None else (*own, self._client_authority)

    def _read(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise SettingsError(f"cannot read the TLS files: {error}") from error
