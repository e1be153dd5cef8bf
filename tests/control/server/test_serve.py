"""``eplb serve`` as a process: it prints its addresses, reports errors in one line, and stops cleanly."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eplb_service.control.server.listening import ListenError
from eplb_service.control.server.service import run_service
from eplb_service.control.server.settings import SettingsError
from eplb_service.control.server.store_file import StoreError
from tests.control.server.certificates import Authority
from tests.control.server.service_under_test import settings

ADDRESSES = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
COMMAND = [sys.executable, "-m", "eplb_service.cli.main", "serve", *ADDRESSES]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [*COMMAND, "--store", str(tmp_path / "state.sqlite3")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    with process:
        yield process
        process.kill()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_prints_its_addresses_and_stops_on_a_signal(
    process: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(
        r"eplb: agents and operators at 127\.0\.0\.1:\d+, metrics at http://127\.0\.0\.1:(\d+)/metrics, "
        r"web page at http://127\.0\.0\.1:\1/\n",
        line,
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert '"event": "stopping"' in errors


@pytest.mark.e2e
def test_connections_without_tls_do_not_fill_the_log(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "authority").sign("localhost")
    flags = ["--store", ":memory:", "--tls-cert", str(certificate), "--tls-key", str(key)]
    with subprocess.Popen(
        [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = re.search(r"operators at 127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert address is not None
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", int(address[1])), timeout=20) as link:
                link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                link.recv(100)
        process.terminate()
        _, errors = process.communicate(timeout=300)
    assert len(errors.splitlines()) < 10, errors


def test_a_flag_overrides_its_variable_even_with_the_default_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    monkeypatch.setenv("EPLB_WINDOW_STEPS", "0")
    assert run(["serve", "--listen", "nowhere"]) == 2
    assert "setting window_steps" in capsys.readouterr().err
    assert run(["serve", "--listen", "nowhere", "--window-steps", "512"]) == 2
    assert "setting window_steps" not in capsys.readouterr().err


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NESTED, "is nested too deeply; it must be a list of credentials"),
        ("- {name: a, role: reader, deployments: ['*'], token: 2024-99-99}", "is not valid YAML"),
        ("- !!timestamp nonsense", "is not valid YAML"),
        ("- {name: a, ? [b] : c}", "is not valid YAML"),
    ],
    ids=["nested too deeply", "invalid date", "invalid timestamp", "list as a key"],
)
def test_unparsable_credentials_are_reported_in_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    (tmp_path / "credentials.yaml").write_text(content)
    flags = ["--store", ":memory:", "--credentials", str(tmp_path / "credentials.yaml")]
    assert run(["serve", *ADDRESSES, *flags]) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert f"credentials.yaml {message}" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [(NESTED, "is nested too deeply"), ("window_steps: 2024-99-99", "is not valid YAML")],
)
def test_unparsable_settings_are_reported_in_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    (tmp_path / "eplb.yaml").write_text(content)
    assert run(["serve", "--config", str(tmp_path / "eplb.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("flag", ["--listen", "--metrics"])
def test_an_address_in_use_is_explained_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    from eplb_service.cli.main import run

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert run(["serve", "--store", ":memory:", *ADDRESSES, flag, address]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("eplb: error: cannot ")
    assert f"{address}: another program is listening there, most likely another `eplb serve`" in line
    assert line.endswith(f"or choose another address with {flag}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window-steps", "0"], "setting window_steps"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["--store", "nowhere/state.sqlite3", *ADDRESSES], "directory"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    assert run(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eplb: error: ")
    assert message in line


@pytest.mark.parametrize(("source", "warnings"), [("flag", 1), ("variable", 0)])
def test_a_token_on_the_command_line_causes_a_warning(
    source: str, warnings: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eplb_service.cli import serve
    from eplb_service.cli.main import run

    async def return_at_once(*_: object) -> None:
        pass

    monkeypatch.setattr(serve, "serve_until_stopped", return_at_once)
    if source == "variable":
        monkeypatch.setenv("EPLB_AUTH_TOKEN", "token-0123456789")
    flags = ["--auth-token", "token-0123456789"] if source == "flag" else []
    assert run(["serve", *ADDRESSES, *flags]) == 0
    errors = capsys.readouterr().err
    assert errors.count("token_on_command_line") == errors.count("with --credentials") == warnings
    assert "token-0123456789" not in errors


def test_a_lost_lease_is_not_reported_as_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eplb_service.cli import serve
    from eplb_service.cli.main import run
    from eplb_service.control.server.lease.errors import LeaseLostError

    async def lost(*_: object) -> None:
        raise LeaseLostError("this service has lost lease eplb")

    monkeypatch.setattr(serve, "serve_until_stopped", lost)
    assert run(["serve", *ADDRESSES]) == 1
    assert capsys.readouterr().err == "eplb: error: this service has lost lease eplb\n"


@pytest.mark.parametrize("state", ["set", "default"])
async def test_the_default_store_path_does_not_depend_on_the_working_directory(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    home = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state == "set":
        monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    async with run_service(settings(store=None)):
        pass
    state_folder = home / "state" if state == "set" else home / ".local" / "state"
    assert (state_folder / "eplb" / "state.sqlite3").is_file()
    assert list(folder.iterdir()) == []


FAULTY_SETTINGS = {
    "agents' port in use": lambda folder, port: {"listen": f"127.0.0.1:{port}"},
    "metrics port in use": lambda folder, port: {"metrics": f"127.0.0.1:{port}"},
    "page port in use": lambda folder, port: {"page": f"127.0.0.1:{port}"},
    "health port in use": lambda folder, port: {"health": f"127.0.0.1:{port}"},
    "missing credentials": lambda folder, port: {"credentials": folder / "nowhere"},
    "missing certificates": lambda folder, port: {"tls_cert": folder / "a", "tls_key": folder / "b"},
    "invalid prior": lambda folder, port: {"prior": "nonsense"},
}


@pytest.mark.parametrize("fault", FAULTY_SETTINGS)
async def test_a_failed_start_creates_no_store(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        changes = FAULTY_SETTINGS[fault](tmp_path, listener.getsockname()[1])
        for store in (None, str(tmp_path / "named.sqlite3")):
            with pytest.raises((SettingsError, ListenError)):
                async with run_service(settings(store=store, **changes)):
                    pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (None, None, True),
        (None, "file:lease", True),
        ("file:lease", None, True),
        ("file:lease", "file:other", True),
        ("file:lease", "file:lease", False),
    ],
)
async def test_two_services_share_a_store_only_under_the_same_lease(
    first: str | None, second: str | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with run_service(settings(store=None, lease=first)):
        if refused:
            with pytest.raises(StoreError, match=rf"in use by process {os.getpid()} .*--store"):
                async with run_service(settings(store=None, lease=second)):
                    pass
        else:
            # A leader that has lost the lease may still be closing the store.
            async with run_service(settings(store=None, lease=second)):
                pass
    async with run_service(settings(store=None, lease=second)):
        pass


async def test_a_store_is_locked_under_all_its_paths(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    async with run_service(settings(store=str(tmp_path / "store"))):
        with pytest.raises(StoreError, match="in use"):
            async with run_service(settings(store=str(tmp_path / "link"))):
                pass


@pytest.mark.e2e
def test_a_second_service_on_the_same_store_is_rejected_in_one_line(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert process.stdout is not None
    process.stdout.readline()
    command = [*COMMAND, "--store", str(tmp_path / "state.sqlite3")]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert second.returncode == 2
    assert f"in use by process {process.pid} " in second.stderr.splitlines()[-1]
    process.kill()
    process.wait()
    # A killed service leaves no lock behind.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as third:
        assert third.stdout is not None
        assert third.stdout.readline().startswith("eplb: agents and operators at")
        third.kill()
