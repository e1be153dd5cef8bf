"""The alerts fire and end when they should: promtool's unit tests, where it is here or can be fetched."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.prometheus_binaries import find

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def promtool():
    found = find("promtool")
    if found is None:
        pytest.skip(
            "ALERTS ARE NOT TESTED: no promtool here, and Debian's package prometheus cannot be fetched"
        )
    return found


def test_rules_pass_their_unit_tests(promtool, tmp_path):
    for path in (ROOT / "deploy/prometheus/rules.yml", Path(__file__).parent / "rules_test.yml"):
        shutil.copy(path, tmp_path)
    command = [promtool, "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_valid(promtool):
    command = [promtool, "check", "config", str(ROOT / "deploy/prometheus/prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
