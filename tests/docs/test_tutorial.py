"""The tutorial's commands run verbatim, in order, and write the files that the text names."""

import asyncio
import contextlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from eplb_service.cli import main
from eplb_service.control.server.service import run_service
from eplb_service.io.open_trace import open_trace
from tests.control.fake_group import FakeGroup, skewed_heat
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.service_under_test import settings, until

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "tutorial.md").read_text()


def commands(kind):
    return [
        line for block in re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
    ]


COMMANDS = commands("sh")
OF_A_SERVICE = commands("sh service")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Copy ``docs/tutorial`` to a working directory for the commands."""
    copy = tmp_path_factory.mktemp("tutorial") / "tutorial"
    shutil.copytree(DOCS / "tutorial", copy)
    return copy


def run(command, capsys):
    name, *arguments = shlex.split(command)
    assert name == "eplb"
    assert main.run(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
    reported = capsys.readouterr()
    assert reported.out, command
    assert "eplb: error" not in reported.err, command


def test_every_command_runs(folder, monkeypatch, capsys):
    assert COMMANDS[0] == "cd docs/tutorial"
    assert len(COMMANDS) > 12
    assert {command.split()[1] for command in COMMANDS[1:]} == {"trace", "advise", "replay", "solve"}
    assert {command.split()[1] for command in OF_A_SERVICE} == {"trace", "history", "status"}
    monkeypatch.chdir(folder)
    # The installed command does not put the current directory on the path either.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    for command in COMMANDS[1:]:
        run(command, capsys)
    for name in re.findall(r"--(?:out|report) (\S+)", "\n".join(COMMANDS)):
        assert (folder / name).exists(), name


async def test_every_operator_command_runs_while_a_service_is_running(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    async with run_service(settings()) as service, FakeGroup(service.address) as group:
        monkeypatch.setenv("EPLB_ADDRESS", service.address)
        await group.join()
        serving = asyncio.create_task(serve(group))
        await until(lambda: service.plane.deployments["decode"].ended_plan is not None)
        for command in OF_A_SERVICE:
            await asyncio.to_thread(run, command, capsys)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    trace = open_trace(folder / "live.zarr")
    assert trace.steps >= 96
    assert trace.source_rows(0, 1) is not None


async def serve(group):
    """Send heat as a model would, carry out the first plan, and continue until cancelled."""
    for number in range(4):
        await group.send_heat(skewed_heat(8, seed=number))
    await group.carry_out(await group.hear_plan())
    number = 4
    while True:
        await group.send_heat(skewed_heat(8, seed=number))
        number += 1
        await asyncio.sleep(0.05)
