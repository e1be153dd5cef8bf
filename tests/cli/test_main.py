"""``eplb`` starts fast, names its commands, and answers a user's mistake with one line and exit code 2."""

import subprocess
import sys

import numpy as np
import pytest

from eplb_service import PlacementError, __version__
from eplb_service.cli import main
from eplb_service.cli.command_list import COMMANDS
from eplb_service.cli.errors import UserError


def run(capsys, *arguments):
    code = main.run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"eplb {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_every_command(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    for name in COMMANDS:
        assert name in out


def test_help_imports_nothing_heavy():
    probe = (
        "import sys; from eplb_service.cli import main; main.run(['--help']);"
        "print(sorted({'numba', 'grpc', 'torch', 'pydantic_settings'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_helps(capsys, name):
    if name == "demo":
        pytest.importorskip("torch")
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"eplb {name}" in out


def test_unknown_command_is_one_line(capsys):
    code, out, err = run(capsys, "slove")
    assert (code, out) == (2, "")
    assert err.startswith("eplb: error: No such command 'slove'.")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "No such option: --bogus"),
        (["solve", "--bogus"], "No such option: --bogus"),
        (["solve"], "Missing option"),
        (["solve", "--heat", "x.npz", "--ranks", "many"], "'--ranks'"),
        (["replay", "--heat", "x.npz", "--ranks", "0"], "'--ranks'"),
    ],
)
def test_wrong_arguments_end_in_one_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("eplb: error: ")
    assert message in err
    assert "--help" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["replay", "--heat", "x.npz", "--ranks", "4", "--policy", "none", "--policy=deepseek"],
            "--policy is given twice; write its values with commas between them (see 'eplb replay --help')",
        ),
        (["sweep", "x", "--ranks", "4", "--interval", "8", "--interval", "16"], "with commas between them"),
        (
            ["solve", "--heat", "x", "--ranks", "4", "--ranks", "8", "--ranks=2"],
            "given 3 times; give it once",
        ),
        (
            ["replay", "--heat", "x", "--hindsight", "--no-hindsight"],
            "--hindsight/--no-hindsight is given twice",
        ),
        (["trace", "slice", "x", "--steps", "0:1", "--steps", "3:4"], "--steps is given twice; give it once"),
        (["serve", "--listen", "a:1", "--listen", "b:1"], "--listen is given twice; give it once"),
    ],
)
def test_an_option_given_twice_never_keeps_just_the_last(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_may_be_repeated_is_not_refused(capsys):
    code, _, err = run(
        capsys, "sweep", "x", "--ranks", "4", "--set", "gain=1", "--set", "horizon=2", "--json", "--json"
    )
    assert code == 2
    assert "twice" not in err


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
def test_a_users_mistake_is_one_line(capsys, monkeypatch, error):
    command_that_raises(monkeypatch, error)
    code, out, err = run(capsys, "solve")
    assert (code, out) == (2, "")
    assert err.startswith("eplb: error: ")
    assert "no such thing" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug"), OSError(5, "a bug")])
def test_a_bug_is_not_hidden(monkeypatch, error):
    command_that_raises(monkeypatch, error)
    with pytest.raises(type(error)):
        main.run(["solve"])


def test_interrupt(monkeypatch, capsys):
    command_that_raises(monkeypatch, KeyboardInterrupt())
    assert run(capsys, "solve")[0] == 130


def shell(command):
    eplb = f"{sys.executable} -m eplb_service.cli.main"
    return subprocess.run(
        ["bash", "-c", command.format(eplb=eplb)], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_reader_that_leaves_early_ends_the_command_quietly():
    done = shell("(sleep 1; {eplb} --help; echo $? >&2) | true")
    assert done.stderr == "141\n"


def test_a_full_disk_under_the_output_is_one_line():
    done = shell("{eplb} --help > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "eplb: error: the output cannot be written (No space left on device)\n"


def test_a_full_disk_under_the_output_is_not_taken_for_a_trace_that_cannot_be_read(tmp_path):
    trace, out = tmp_path / "trace.npy", tmp_path / "trace.npz"
    np.save(trace, np.ones((4, 2, 8), dtype=int))
    done = shell(f"{{eplb}} trace convert {trace} --out {out} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "eplb: error: the output cannot be written (No space left on device)\n"
    assert out.exists()
