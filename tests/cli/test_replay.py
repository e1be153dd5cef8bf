"""Tests of ``eplb replay``: policies scored over the same steps, and errors on one line."""

import json
from contextlib import nullcontext

import numpy as np
import pytest

from eplb_core.cost.curve import write_curves
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb
from tests.cli.published import checked_document
from tests.cost.curves import H200

LAYERS = 2
EXPERTS = 16
RANKS = 4


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, heat=synthetic_heat("drift", 100, LAYERS, EXPERTS, tokens=256, top_k=2, seed=1))
    return path


def replay(capsys, *arguments):
    return eplb(capsys, "replay", *arguments)


def test_json_on_stdout_and_in_the_file_agree(tmp_path, trace, capsys):
    out = tmp_path / "replay.json"
    schedule = ("--window", 40, "--interval", 25)
    code, printed, _ = replay(
        capsys, "--heat", trace, "--ranks", RANKS, "--slots", 5, *schedule, "--out", out, "--json"
    )
    assert code == 0
    reported = checked_document("replay", printed)
    assert reported == json.loads(out.read_text())
    assert list(reported["policies"]) == ["none", "deepseek", "flashlb"]
    assert reported["steps"] == 75
    for policy in reported["policies"].values():
        assert [decision["step"] for decision in policy["decisions"]] == [25, 50, 75]
        assert [decision["steps"] for decision in policy["decisions"]] == [25, 25, 25]
    assert reported["policies"]["flashlb"]["par"] < reported["policies"]["none"]["par"]
    assert reported["policies"]["none"]["moves"] == 0


def test_every_combination_of_window_interval_and_slots_has_a_line(trace, capsys):
    swept = ("--redundant", "0,4", "--window", "20,40", "--interval", "20,30", "--policy", "none")
    code, printed, _ = replay(capsys, "--heat", trace, "--ranks", RANKS, *swept, "--no-hindsight")
    assert code == 0
    assert "2 layers x 16 experts on 4 ranks; steps scored 70, intervals 3 or 4" in printed
    assert printed.count("none,") == 8
    assert "deepseek" not in printed
    assert "regret" not in printed


def test_steps_without_tokens_do_not_make_a_figure_nan(trace, tmp_path, capsys):
    heat_TLE = np.load(trace)["heat"]
    heat_TLE[40:70] = 0
    np.savez(trace, heat=heat_TLE)
    schedule = ("--window", 10, "--interval", 5, "--policy", "none,flashlb")
    report = ("--report", tmp_path / "report.html")
    code, printed, err = replay(capsys, "--heat", trace, "--ranks", RANKS, "--slots", 5, *schedule, *report)
    assert (code, err) == (0, "")
    assert "nan" not in printed


def test_defaults_equal_those_of_the_service():
    from eplb_service.cli.main import load_command
    from eplb_service.control.server.settings import ServiceSettings

    defaults = {option.name: option.default for option in load_command("replay").params}
    service = ServiceSettings.model_fields
    assert defaults["window"] == str(service["window_steps"].default)
    assert defaults["interval"] == str(service["decision_interval"].default)


def test_ctrl_c_prints_and_writes_the_finished_results(tmp_path, trace, capsys, monkeypatch):
    from eplb_service.cli import replay as command

    def advance(label, done):
        if label == "flashlb":
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "replay_progress", lambda jobs, steps: nullcontext(advance))
    out = tmp_path / "replay.json"
    report = tmp_path / "report.html"
    arguments = ("--slots", 5, "--window", 25, "--interval", 25, "--policy", "none,flashlb", "--workers", 1)
    monkeypatch.chdir(tmp_path)
    code, printed, _ = replay(
        capsys, "--heat", trace, "--ranks", RANKS, *arguments, "--out", out, "--report", report
    )
    assert code == 130
    assert "intervals 3; stopped early, unfinished policies omitted" in printed
    assert json.loads(out.read_text())["interrupted"] is True
    assert "stopped early" in report.read_text()


def test_a_cost_curve_adds_milliseconds(tmp_path, capsys):
    np.savez(tmp_path / "heat.npz", heat=synthetic_heat("static", 60, 1, 16, tokens=512, top_k=2, seed=1))
    write_curves(tmp_path / "curve.json", [H200])
    shape = ["--heat", tmp_path / "heat.npz", "--ranks", 4, "--redundant", "0,4"]
    schedule = ["--window", 20, "--interval", 20, "--policy", "none,flashlb", "--no-hindsight"]
    arguments = [*shape, *schedule, "--cost-curve", tmp_path / "curve.json"]
    code, out, _ = replay(capsys, *arguments)
    assert code == 0
    assert "MoE ms" in out
    assert "Based on: cost_curve 20 us" in out
    reported = checked_document("replay", replay(capsys, *arguments, "--json")[1])
    assert reported["costs"]["curve"]["read_us"] == 11.6
    assert reported["policies"]["none, 4 slots"]["moe_ms"] > 0
