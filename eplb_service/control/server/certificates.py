"""The certificate that the service shows, read again when its files change: it is renewed without a restart."""

from __future__ import annotations

from pathlib import Path

import grpc
import structlog

from eplb_service.control.server.settings import SettingsError

_log = structlog.get_logger(__name__)


class Certificates:
    """PEM files of a listener.

    Parameters
    ----------
    certificate, key
        The service's own.
    client_authority
        Who signs client certificates; ``None`` where none are asked for.

    Raises
    ------
    SettingsError
        A file cannot be read.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._paths = tuple(path for path in (key, certificate, client_authority) if path is not None)
        self._contents = self._read()

    def current(self) -> grpc.ServerCertificateConfiguration:
        """What new connections are shown."""
        key, certificate, *authority = self._contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], *authority)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What to show from now on, or ``None`` where it is the same; asked by gRPC at each handshake."""
        try:
            contents = self._read()
        except SettingsError as error:
            _log.error("certificate_unreadable", reason=str(error))
            return None
        if contents == self._contents:
            return None
        self._contents = contents
        return self.current()

    def _read(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise SettingsError(f"cannot read the TLS files: {error}") from error
