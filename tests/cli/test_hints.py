"""Tests of hints: impossible settings are rejected, and likely mistakes produce a hint on stderr."""

import socket

import numpy as np
import pytest

from eplb_service.cli import main, planner_options
from eplb_service.cli.file_options import ReadingOptions
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb

ROWS = "step,layer,expert,tokens\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "heat.csv"
    path.write_text(ROWS + "0,3,0,9\n0,3,1,5\n1,3,7,1\n1,5,0,4\n")
    return path


def test_experts_that_never_receive_a_token_get_a_hint(trace, capsys):
    opened = ReadingOptions(None, None, None, None, None).open(trace)
    assert opened.shape == (2, 2, 8)
    assert "hint: in layer 5, 7 of 8 experts never get a token" in capsys.readouterr().err


def test_a_trace_in_which_most_experts_are_busy_gets_no_hint(tmp_path, capsys):
    path = tmp_path / "heat.csv"
    path.write_text(ROWS + "0,0,0,9\n0,0,1,5\n1,0,3,1\n")
    ReadingOptions(None, None, None, None, None).open(path)
    assert capsys.readouterr().err == ""


def test_groups_that_do_not_divide_the_experts_are_rejected(trace, capsys):
    assert (
        main.run(["solve", "--heat", str(trace), "--ranks", "4", "--slots", "3", "--expert-groups", "5"]) == 2
    )
    assert "--expert-groups 5 does not divide the 8 experts evenly" in capsys.readouterr().err


def test_heat_that_no_decision_uses_gets_a_hint(capsys):
    planner_options.check_windows([64, 512], [64])
    assert capsys.readouterr().err == ""
    planner_options.check_windows([64, 512], [256])
    assert "decisions use only the last 64 of every 256 steps" in capsys.readouterr().err


@pytest.fixture
def wide(tmp_path):
    """Write a trace of 96 steps in which all 8 experts receive tokens."""
    path = tmp_path / "heat.npz"
    np.savez(path, heat=synthetic_heat("static", 96, 1, 8, tokens=256, top_k=2, seed=3))
    return path


COMMANDS = {
    "solve": ("--slots", 3),
    "replay": ("--slots", 3, "--window", 16, "--interval", 16, "--policy", "none", "--workers", 1),
    "prove": ("--slots", 3, "--window", 16, "--interval", 16, "--workers", 1),
    "sweep": ("--slots", 3, "--window", 16, "--interval", 16, "--policy", "none", "--workers", 1),
    "advise": ("--redundant", 0, "--window", 8, "--policy", "none", "--workers", 1),
}


def run(capsys, command, trace, *options):
    named = (trace,) if command == "sweep" else ("--heat", trace)
    return eplb(capsys, command, *named, "--ranks", 4, *COMMANDS[command], *options)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_planning_command_checks_the_expert_groups(command, wide, capsys):
    code, _, err = run(capsys, command, wide, "--expert-groups", 3)
    assert code == 2
    assert "--expert-groups 3 does not divide the 8 experts evenly" in err
    code, _, err = run(capsys, command, wide, "--expert-groups", 8, "--nodes", "0,0,0,1")
    assert code == 0, err
    assert "hint: --expert-groups has no effect: 8 experts in 8 groups cannot be spread evenly" in err
    code, _, err = run(capsys, command, wide)
    assert (code, "hint" in err) == (0, False)


@pytest.mark.parametrize("command", ["prove", "replay", "sweep"])
def test_a_window_shorter_than_the_interval_gets_a_hint(command, wide, capsys):
    code, _, err = run(capsys, command, wide, "--interval", 32)
    assert code == 0
    assert "hint: with --window 16 and --interval 32, decisions use only the last 16 of every 32 steps" in err


def test_a_window_too_long_to_compare_gets_a_hint(wide, capsys):
    code, _, err = run(capsys, "advise", wide, "--window", 48)
    assert code == 0
    assert "hint: 96 steps are too few to compare schedules with --window 48" in err
    assert "windows of at most 31 steps" in err


def test_a_service_whose_window_is_shorter_than_its_interval_warns(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code, _, err = eplb(
            capsys,
            *("serve", "--window-steps", 16, "--decision-interval", 32, "--store", ":memory:"),
            *("--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{listener.getsockname()[1]}"),
        )
    assert code == 2
    assert "window_shorter_than_interval" in err
    assert "decisions use only the last 16 of every 32 steps" in err
