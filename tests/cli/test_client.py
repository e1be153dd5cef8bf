"""A command that does not reach its service says why: nobody listens, TLS is missing on one side, or trust is."""

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
    """A gRPC server that speaks TLS with a certificate and its key, if given."""
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
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


def said(capsys: Any, address: str, *flags: object, command: tuple[str, ...] = ("status", "decode")) -> str:
    code, out, err = eplb(capsys, *command, "--address", address, *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "no service listens" not in err or address.endswith(":1")
    return str(err)


@pytest.mark.parametrize("command", [("status", "decode"), ("pause", "decode"), ("deployments",)])
def test_a_service_with_tls_and_no_authority_named(
    capsys: Any, ours: Authority, command: tuple[str, ...]
) -> None:
    with serving(*ours.sign("localhost")) as address:
        assert "uses TLS; pass its CA certificate with --tls-ca" in said(capsys, address, command=command)


def test_a_certificate_of_another_authority_or_name_or_that_has_expired(
    capsys: Any, ours: Authority, other: Authority
) -> None:
    with serving(*ours.sign("localhost")) as address:
        assert "cannot be verified: " in said(capsys, address, "--tls-ca", other.ca)
    with serving(*ours.sign("localhost", expired=True)) as address:
        assert "certificate has expired" in said(capsys, address, "--tls-ca", ours.ca)
    with serving(*ours.sign("elsewhere.example", ip="192.0.2.1")) as address:
        assert "not valid for '127.0.0.1'; check --tls-ca" in said(capsys, address, "--tls-ca", ours.ca)
        host = address.replace("127.0.0.1", "localhost")
        assert "not valid for 'localhost'" in said(capsys, host, "--tls-ca", ours.ca)


def test_a_client_certificate_that_is_missing_or_another_s(
    capsys: Any, ours: Authority, other: Authority
) -> None:
    with serving(*ours.sign("localhost"), client_ca=ours.ca) as address:
        assert "requires a client certificate" in said(capsys, address, "--tls-ca", ours.ca)
        certificate, key = other.sign("stranger")
        flags = ("--tls-ca", ours.ca, "--tls-cert", certificate, "--tls-key", key)
        assert "requires a client certificate that it trusts" in said(capsys, address, *flags)


def test_a_service_without_tls_and_an_authority_named(capsys: Any, ours: Authority) -> None:
    with serving() as address:
        assert "does not use TLS; remove --tls-ca" in said(capsys, address, "--tls-ca", ours.ca)


def test_files_that_are_no_certificates(capsys: Any, ours: Authority, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with serving(*ours.sign("localhost")) as address:
        assert "cannot be used" in said(capsys, address, "--tls-ca", tmp_path / "ca.pem")


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_nobody_and_somebody_else(capsys: Any) -> None:
    assert "no service listens at 127.0.0.1:1" in said(capsys, "127.0.0.1:1")
    with http.server.HTTPServer(("127.0.0.1", 0), _Quiet) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{other.server_address[1]}"
        assert f"{address} is not an eplb service, or is too busy" in said(capsys, address)
        other.shutdown()
