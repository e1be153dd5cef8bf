"""Tests for when alerts fire and resolve, run as promtool unit tests and skipped if promtool is not available."""

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from tools.prometheus_binaries import find

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def promtool():
    path = find("promtool")
    if path is None:
        pytest.skip(
            "ALERTS ARE NOT TESTED: promtool is not installed, and Debian's package prometheus cannot be fetched"
        )
    return path


def test_rules_pass_their_unit_tests(promtool, tmp_path):
    for path in (ROOT / "deploy/prometheus/rules.yml", Path(__file__).parent / "rules_test.yml"):
        shutil.copy(path, tmp_path)
    command = [promtool, "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def minutes(time):
    return int(time[:-1]) * {"m": 1, "h": 60}[time[-1]]


def test_every_rule_is_tested_before_during_and_after_its_alert():
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    tested = yaml.safe_load((Path(__file__).parent / "rules_test.yml").read_text())
    seen = defaultdict(list)
    for number, scene in enumerate(tested["tests"]):
        for case in scene["alert_rule_test"]:
            at = number, minutes(case["eval_time"])
            seen[case["alertname"]].append((*at, bool(case["exp_alerts"])))
    for name in (rule["alert"] for group in rules["groups"] for rule in group["rules"]):
        order = [fires for *_, fires in sorted(seen[name])]
        assert "".join("x" if fires else "-" for fires in order).count("-x-"), name


def test_the_prometheus_configuration_is_valid(promtool):
    command = [promtool, "check", "config", str(ROOT / "deploy/prometheus/prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
