"""Tests of the device checks: their table, exit codes and time limits, and each part on a CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tools import device_checks
from tools.device_checks import PASSED, Check, Outcome, checks, main, of_round_trip, report, run
from worker_agent.doctor import FAILED, SKIPPED


def check(name: str, code: str, seconds: float = 60) -> Check:
    return Check(name, [sys.executable, "-c", code], seconds)


def test_the_exit_code_is_2_on_a_machine_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", None, raising=False)
    assert main([]) == 2
    assert "no GPU or NPU on this machine" in capsys.readouterr().out


def test_the_table_has_every_check_and_a_failure_sets_the_exit_code(capsys):
    outcomes = run(
        [
            check("works", "print('3 us per layer')"),
            check("breaks", "raise SystemExit('wrong bytes')"),
            check("finds no test", "raise SystemExit(5)"),
            check("skips all", "print('4 skipped in 1.0s')"),
            check("hangs", "import time; time.sleep(60)", seconds=1),
        ],
        seconds=60,
    )
    assert [outcome.verdict for outcome in outcomes] == [PASSED, FAILED, SKIPPED, SKIPPED, FAILED]
    assert [outcome.text for outcome in outcomes[:2]] == ["3 us per layer", "wrong bytes"]
    assert outcomes[-1].text == "timed out after 1 s"
    capsys.readouterr()
    assert report(outcomes) == 1
    assert len(capsys.readouterr().out.strip().splitlines()) == len(outcomes)
    assert report([outcome for outcome in outcomes if outcome.verdict != FAILED]) == 0


def test_a_check_fails_if_no_time_is_left():
    assert run([check("late", "print('done')")], seconds=0) == [
        Outcome("late", FAILED, pytest.approx(0, abs=1), "no time left")
    ]


def test_the_time_limits_of_all_checks_add_up_to_at_most_eight_minutes():
    planned = checks("cpu")
    assert {"transfers, verified", "captured graphs", "staging reserved"} <= {check.name for check in planned}
    assert sum(check.seconds for check in planned) <= device_checks.MAX_SECONDS <= 8 * 60


@pytest.mark.parametrize("name", device_checks.PARTS)
def test_every_part_runs_on_a_cpu(name, capsys, monkeypatch):
    monkeypatch.setattr(device_checks, "_HIDDEN", 64)
    monkeypatch.setattr(device_checks, "_INTERMEDIATE", 64)
    assert main(["--device", "cpu", "--part", name]) == 0
    assert {
        "transfers": "all values unchanged",
        "staging": "MiB",
        "counting": "us per layer",
        "commit": "ms",
    }[name] in capsys.readouterr().out


def test_only_the_doctors_device_findings_decide_the_result_of_the_round_trip():
    findings = [
        {"name": "service", "verdict": FAILED, "text": "no service is named"},
        {"name": "expert round trip", "verdict": "ok", "text": "133 MB"},
    ]
    assert of_round_trip(json.dumps(findings)) == "expert round trip: 133 MB"
    findings[1] |= {"verdict": FAILED, "text": "bytes differ"}
    for output, reason in (
        (json.dumps(findings), "expert round trip: bytes differ"),
        (json.dumps(findings[:1]), "did not test the devices"),
        ("Traceback\nno torch", "no torch"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            of_round_trip(output)
