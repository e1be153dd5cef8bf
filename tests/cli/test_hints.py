"""Settings that cannot work are refused, and those that are probably not meant get a hint on stderr."""

import pytest

from eplb_service.cli import main, trace_options
from eplb_service.cli.trace_options import ReadingOptions

ROWS = "step,layer,expert,tokens\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "heat.csv"
    path.write_text(ROWS + "0,3,0,9\n0,3,1,5\n1,3,7,1\n1,5,0,4\n")
    return path


def test_experts_that_never_get_a_token_are_pointed_out(trace, capsys):
    opened = ReadingOptions(None, None, None, None, None).open(trace)
    assert opened.shape == (2, 2, 8)
    assert "hint: in layer 5, 7 of 8 experts never get a token" in capsys.readouterr().err


def test_a_trace_in_which_most_experts_are_busy_gets_no_hint(tmp_path, capsys):
    path = tmp_path / "heat.csv"
    path.write_text(ROWS + "0,0,0,9\n0,0,1,5\n1,0,3,1\n")
    ReadingOptions(None, None, None, None, None).open(path)
    assert capsys.readouterr().err == ""


def test_groups_that_do_not_divide_the_experts_are_refused(trace, capsys):
    assert (
        main.run(["solve", "--heat", str(trace), "--ranks", "4", "--slots", "3", "--expert-groups", "5"]) == 2
    )
    assert "--expert-groups 5 does not divide the 8 experts evenly" in capsys.readouterr().err


def test_heat_that_no_decision_uses_is_pointed_out(capsys):
    trace_options.check_windows([64, 512], [64])
    assert capsys.readouterr().err == ""
    trace_options.check_windows([64, 512], [256])
    assert "decisions use only the last 64 of every 256 steps" in capsys.readouterr().err
