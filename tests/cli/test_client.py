"""Tests of connection errors: no service is listening, one side does not use TLS, or a certificate is not trusted."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from eplb_service.cli import client
from tests.cli.arguments import eplb
from tests.control.server.certificates import Authority


@contextlib.contextmanager
def serving(*pair: Path, client_ca: Path | None = None) -> Iterator[str]:
    """Run a gRPC server, with TLS if a certificate and its key are passed."""
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    if pair:
        certificate, key = (path.read_bytes() for path in pair)
        authority = None if client_ca is None else client_ca.read_bytes()
        credentials = grpc.ssl_server_credentials([(key, certificate)], authority, client_ca is not None)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 1.5)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


def error_of(
    capsys: Any, address: str, *flags: object, command: tuple[str, ...] = ("status", "decode")
) -> str:
    code, out, err = eplb(capsys, *command, "--address", address, *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "no service is listening" not in err or address.endswith(":1")
    return str(err)


@pytest.mark.parametrize("command", [("status", "decode"), ("pause", "decode"), ("deployments",)])
def test_the_error_for_a_service_with_tls_asks_for_its_ca_certificate(
    capsys: Any, authority: Authority, command: tuple[str, ...]
) -> None:
    with serving(*authority.sign("localhost")) as address:
        assert "uses TLS; pass its CA certificate with --tls-ca" in error_of(capsys, address, command=command)


def test_an_expired_certificate_or_one_with_the_wrong_authority_or_host_is_rejected(
    capsys: Any, authority: Authority, stranger: Authority
) -> None:
    with serving(*authority.sign("localhost")) as address:
        assert "cannot be verified: " in error_of(capsys, address, "--tls-ca", stranger.ca)
    with serving(*authority.sign("localhost", expired=True)) as address:
        assert "certificate has expired" in error_of(capsys, address, "--tls-ca", authority.ca)
    with serving(*authority.sign("elsewhere.example", ip="192.0.2.1")) as address:
        assert "not valid for '127.0.0.1'; check --tls-ca" in error_of(
            capsys, address, "--tls-ca", authority.ca
        )
        host = address.replace("127.0.0.1", "localhost")
        assert "not valid for 'localhost'" in error_of(capsys, host, "--tls-ca", authority.ca)


def test_a_missing_or_untrusted_client_certificate_is_reported(
    capsys: Any, authority: Authority, stranger: Authority
) -> None:
    with serving(*authority.sign("localhost"), client_ca=authority.ca) as address:
        assert "requires a client certificate" in error_of(capsys, address, "--tls-ca", authority.ca)
        certificate, key = stranger.sign("stranger")
        flags = ("--tls-ca", authority.ca, "--tls-cert", certificate, "--tls-key", key)
        assert "requires a client certificate that it trusts" in error_of(capsys, address, *flags)


def test_a_ca_certificate_for_a_service_without_tls_is_reported(capsys: Any, authority: Authority) -> None:
    with serving() as address:
        assert "does not use TLS; remove --tls-ca" in error_of(capsys, address, "--tls-ca", authority.ca)


def test_a_file_that_is_not_a_certificate_is_reported(
    capsys: Any, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with serving(*authority.sign("localhost")) as address:
        assert "cannot be used" in error_of(capsys, address, "--tls-ca", tmp_path / "ca.pem")


@pytest.mark.parametrize("flags", [(), ("--insecure",), ("--plaintext-token",)])
def test_a_token_is_sent_unencrypted_only_on_a_trusted_network(
    flags: tuple[str, ...], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.Connection, "_diagnose", lambda _: "there is no service")
    error = error_of(capsys, "192.0.2.1:9", "--token", "sesame", *flags)
    assert ("there is no service" in error) == bool(flags)
    assert ("would be sent in plain text" in error) != bool(flags)


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_missing_service_is_distinguished_from_an_unrelated_server(capsys: Any) -> None:
    assert "no service is listening at 127.0.0.1:1" in error_of(capsys, "127.0.0.1:1")
    with http.server.HTTPServer(("127.0.0.1", 0), _Quiet) as website:
        threading.Thread(target=website.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{website.server_address[1]}"
        assert f"{address} is not an eplb service, or is too busy" in error_of(capsys, address)
        website.shutdown()
