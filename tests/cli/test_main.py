"""Tests of ``eplb`` itself: quick startup, help, and a one-line error with exit code 2 for a user's mistake."""

import subprocess
import sys

import numba
import numpy as np
import pytest

from eplb_core.solver import jit
from eplb_service import PlacementError, __version__
from eplb_service.cli import main
from eplb_service.cli.options import UserError
from tests.cli.arguments import eplb, refusal


def test_version_is_printed(capsys):
    assert eplb(capsys, "--version") == (0, f"eplb {__version__}\n", "")


def test_eplb_without_a_command_prints_the_help(capsys):
    assert eplb(capsys) == eplb(capsys, "--help")
    assert eplb(capsys, "trace") == eplb(capsys, "trace", "--help")


def test_help_does_not_import_heavy_packages():
    probe = (
        "import sys; from eplb_service.cli import main; main.run(['--help']);"
        "print(sorted({'numba', 'grpc', 'torch', 'pydantic_settings'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == "[]\n"


def command_that_raises(monkeypatch, error):
    def load(name):
        raise error

    monkeypatch.setattr(main, "load_command", load)


@pytest.mark.parametrize(
    "error",
    [
        UserError("no\nsuch  thing"),
        PlacementError("no such thing"),
        FileNotFoundError(2, "no such thing", "x.npz"),
    ],
)
def test_a_users_mistake_is_reported_on_one_line(capsys, monkeypatch, error):
    command_that_raises(monkeypatch, error)
    assert refusal(capsys, "solve").endswith("no such thing\n")


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug"), OSError(5, "a bug")])
def test_a_bug_propagates_as_an_exception(monkeypatch, error):
    command_that_raises(monkeypatch, error)
    with pytest.raises(type(error)):
        main.run(["solve"])


def shell(command):
    eplb = f"{sys.executable} -m eplb_service.cli.main"
    return subprocess.run(
        ["bash", "-c", command.format(eplb=eplb)], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_closed_pipe_ends_the_command_quietly():
    done = shell("(sleep 1; {eplb} --help; echo $? >&2) | true")
    assert done.stderr == "141\n"


def test_a_full_disk_is_not_reported_as_an_unreadable_trace(tmp_path):
    trace = tmp_path / "trace.npy"
    out = tmp_path / "trace.npz"
    np.save(trace, np.ones((4, 2, 8), dtype=int))
    done = shell(f"{{eplb}} trace convert {trace} --out {out} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "eplb: error: the output cannot be written (No space left on device)\n"
    assert out.exists()


def test_each_solver_kernel_is_reported_once_when_it_is_compiled():
    def doubled(x):
        return 2 * x

    doubled.__module__ = "eplb_core.solver.made_up"
    compiled = numba.njit(doubled)
    reported = []
    with jit.compilations(reported.append):
        compiled(1)
        compiled(2)
        numba.njit(lambda x: x + 1)(1)
    compiled(1.5)
    assert reported == ["made_up.doubled"]


def test_warming_up_reports_its_duration(capsys):
    assert eplb(capsys, "warmup")[1].startswith("solver compiled and cached in ")
