"""``eplb serve`` as a process: it says where it listens, and ends in good order."""

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
from eplb_service.control.server.service import running_service
from eplb_service.control.server.settings import SettingsError
from eplb_service.control.server.store_file import StoreError
from tests.control.server.certificates import Authority
from tests.control.server.service_under_test import settings

ADDRESSES = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
COMMAND = [sys.executable, "-m", "eplb_service.cli.main", "serve", *ADDRESSES]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
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
def test_it_logs_where_it_listens_and_stops_on_a_signal(
    served: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert served.stdout is not None
    line = served.stdout.readline()
    assert re.fullmatch(
        r"eplb: agents and operators at 127\.0\.0\.1:\d+, metrics at http://127\.0\.0\.1:(\d+)/metrics, "
        r"web page at http://127\.0\.0\.1:\1/\n",
        line,
    )
    served.send_signal(number)
    _, errors = served.communicate(timeout=300)
    assert served.returncode == 0, errors
    assert "Traceback" not in errors
    assert '"event": "stopping"' in errors


@pytest.mark.e2e
def test_connections_that_speak_no_tls_leave_nothing_in_the_log(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "authority").sign("localhost")
    flags = ["--store", ":memory:", "--tls-cert", str(certificate), "--tls-key", str(key)]
    with subprocess.Popen(
        [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"operators at 127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", int(found[1])), timeout=20) as link:
                link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                link.recv(100)
        process.terminate()
        _, errors = process.communicate(timeout=300)
    assert len(errors.splitlines()) < 10, errors


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (NESTED, "is nested too deeply; it must be a list of credentials"),
        ("- {name: a, role: reader, deployments: ['*'], token: 2024-99-99}", "is not YAML"),
        ("- !!timestamp nonsense", "is not YAML"),
        ("- {name: a, ? [b] : c}", "is not YAML"),
    ],
    ids=["nested", "a date", "a timestamp", "a list as a key"],
)
def test_credentials_that_cannot_be_parsed_are_reported_in_a_line(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    (tmp_path / "credentials.yaml").write_text(content)
    flags = ["--store", ":memory:", "--credentials", str(tmp_path / "credentials.yaml")]
    assert run(["serve", *ADDRESSES, *flags]) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert f"credentials.yaml {says}" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "says"), [(NESTED, "is nested too deeply"), ("window_steps: 2024-99-99", "is not YAML")]
)
def test_settings_that_cannot_be_parsed_are_reported_in_a_line(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    (tmp_path / "eplb.yaml").write_text(content)
    assert run(["serve", "--config", str(tmp_path / "eplb.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--window-steps", "0"], "setting window_steps"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["--store", "nowhere/state.sqlite3", *ADDRESSES], "directory"),
    ],
)
def test_mistakes_are_reported_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.main import run

    assert run(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eplb: error: ")
    assert says in line


@pytest.mark.parametrize(("by", "warned"), [("flag", 1), ("variable", 0)])
def test_a_token_on_the_command_line_is_warned_about(
    by: str, warned: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eplb_service.cli import serve
    from eplb_service.cli.main import run

    async def at_once(*_: object) -> None:
        pass

    monkeypatch.setattr(serve, "serve_until_stopped", at_once)
    if by == "variable":
        monkeypatch.setenv("EPLB_AUTH_TOKEN", "token-0123456789")
    flags = ["--auth-token", "token-0123456789"] if by == "flag" else []
    assert run(["serve", *ADDRESSES, *flags]) == 0
    said = capsys.readouterr().err
    assert said.count("token_on_command_line") == said.count("with --credentials") == warned
    assert "token-0123456789" not in said


def test_a_lost_lease_is_no_mistake_of_the_user_s(
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


@pytest.mark.parametrize("state", ["named", "by default"])
async def test_the_store_has_a_place_of_its_own_whatever_the_folder(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state == "named":
        monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    async with running_service(settings(store=None)):
        pass
    folder = home / "state" if state == "named" else home / ".local" / "state"
    assert (folder / "eplb" / "state.sqlite3").is_file()
    assert list(here.iterdir()) == []


FAULTY = {
    "a port in use": lambda folder, port: {"listen": f"127.0.0.1:{port}"},
    "a port of metrics in use": lambda folder, port: {"metrics": f"127.0.0.1:{port}"},
    "a port of the page in use": lambda folder, port: {"page": f"127.0.0.1:{port}"},
    "a port of health in use": lambda folder, port: {"health": f"127.0.0.1:{port}"},
    "credentials that are missing": lambda folder, port: {"credentials": folder / "nowhere"},
    "certificates that are missing": lambda folder, port: {"tls_cert": folder / "a", "tls_key": folder / "b"},
    "a prior that is none": lambda folder, port: {"prior": "nonsense"},
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_a_start_that_fails_leaves_no_store(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        changes = FAULTY[fault](tmp_path, other.getsockname()[1])
        for store in (None, str(tmp_path / "named.sqlite3")):
            with pytest.raises((SettingsError, ListenError)):
                async with running_service(settings(store=store, **changes)):
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
async def test_two_services_share_a_store_only_under_one_lease(
    first: str | None, second: str | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with running_service(settings(store=None, lease=first)):
        if refused:
            with pytest.raises(StoreError, match=rf"in use by process {os.getpid()} .*--store"):
                async with running_service(settings(store=None, lease=second)):
                    pass
        else:
            # The old leader may still be closing the store after it has lost the lease.
            async with running_service(settings(store=None, lease=second)):
                pass
    async with running_service(settings(store=None, lease=second)):
        pass


async def test_a_store_is_one_store_under_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    async with running_service(settings(store=str(tmp_path / "store"))):
        with pytest.raises(StoreError, match="in use"):
            async with running_service(settings(store=str(tmp_path / "link"))):
                pass


@pytest.mark.e2e
def test_a_second_service_of_a_user_is_refused_in_a_line(
    served: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert served.stdout is not None
    served.stdout.readline()
    command = [*COMMAND, "--store", str(tmp_path / "state.sqlite3")]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert second.returncode == 2
    assert f"in use by process {served.pid} " in second.stderr.splitlines()[-1]
    served.kill()
    served.wait()
    # A killed service leaves no lock behind.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as third:
        assert third.stdout is not None
        assert third.stdout.readline().startswith("eplb: agents and operators at")
        third.kill()
