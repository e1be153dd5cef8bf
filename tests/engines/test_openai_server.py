"""A server is ended with all its processes, and reported where it ends by itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engines.openai_server import OpenAiServer, ServerError


def _server(folder: Path, script: str) -> OpenAiServer:
    """A server whose interpreter is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return OpenAiServer(python, folder / "log", folder, [], {"PATH": "/usr/bin:/bin"})


def test_a_server_that_ends_while_it_starts_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with (
        _server(tmp_path, "echo no such kernel; exit 3") as server,
        pytest.raises(ServerError, match=r"vLLM ended while it started.*no such kernel"),
    ):
        server.wait_until_healthy()


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    with _server(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait"):
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
            time.sleep(0.01)
        child = Path("/proc") / (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 10
    while child.exists() and "zombie" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or "zombie" in (child / "status").read_text()
