"""A server is started with its own settings, ended with all its processes, and reported where it ends by itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.vllm_serving.server import Server, ServerError, Setting


def _setting(folder: Path, script: str) -> Setting:
    """A server whose interpreter is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Setting(python, folder, ranks=2, redundant=8, sequences=4)


def test_a_server_that_ends_while_it_starts_is_reported_with_its_last_output(tmp_path: Path) -> None:
    setting = _setting(tmp_path, "echo no such kernel; exit 3")
    with (
        Server(setting, tmp_path / "log", {}) as server,
        pytest.raises(ServerError, match=r"vLLM ended while it started.*no such kernel"),
    ):
        server.wait_until_ready()


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    setting = _setting(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    with Server(setting, tmp_path / "log", {}):
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
            time.sleep(0.01)
        child = Path("/proc") / (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 10
    while child.exists() and "zombie" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or "zombie" in (child / "status").read_text()


def test_only_the_balanced_server_hears_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "elsewhere:1")
    setting = _setting(tmp_path, "")
    assert "EPLB_AGENT_SERVICE" not in setting.environment({})
    assert setting.environment({"EPLB_AGENT_SERVICE": "here:2"})["EPLB_AGENT_SERVICE"] == "here:2"
    command = setting.command(8000)
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert json.loads(command[command.index("--eplb-config") + 1])["num_redundant_experts"] == 8
