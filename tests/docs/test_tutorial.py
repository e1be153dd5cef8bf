"""Every command of the tutorial runs as it stands there, in its order, and leaves the files that the text names."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "tutorial.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of ``docs/tutorial`` that commands are run in."""
    copy = tmp_path_factory.mktemp("tutorial") / "tutorial"
    shutil.copytree(DOCS / "tutorial", copy)
    return copy


def test_the_tutorial_has_its_commands():
    assert COMMANDS[0] == "cd docs/tutorial"
    assert len(COMMANDS) > 12
    assert {command.split()[1] for command in COMMANDS[1:]} == {"trace", "advise", "replay", "solve"}


def test_every_command_runs(folder, monkeypatch, capsys):
    from eplb_service.cli import main

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for command in COMMANDS[1:]:
        name, *arguments = shlex.split(command)
        assert name == "eplb"
        assert main.run(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
        told = capsys.readouterr()
        assert told.out, command
        assert "error" not in told.err, command
    for name in re.findall(r"--(?:out|report) (\S+)", TEXT):
        assert (folder / name).exists(), name


def test_a_policy_beside_the_trace_is_found_from_the_shell(folder):
    [command] = [command for command in COMMANDS if "rotate:rotated" in command]
    # As the installed command starts, which does not put the current folder on the path.
    start = "import sys; sys.path.remove(''); from eplb_service.cli.main import main; main()"
    arguments = [sys.executable, "-c", start, *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rotate:rotated" in done.stdout


def test_the_trace_that_ships_is_small():
    size = sum(path.stat().st_size for path in (DOCS / "tutorial").rglob("*") if path.is_file())
    assert size < 1 << 20
