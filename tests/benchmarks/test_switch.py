"""The benchmark of the layer switch runs to its end: its fakes are what adapters read of an engine."""

import json
import subprocess
import sys

import pytest

SMALL = ["--pairs", "32", "--rounds", "2", "--hidden", "64", "--intermediate", "32"]


@pytest.mark.slow
def test_every_ratio_of_the_layer_switch_is_measured(tmp_path):
    found = tmp_path / "found.json"
    subprocess.run([sys.executable, "-m", "benchmarks.switch.run", *SMALL, "--json", found], check=False)
    ratios = json.loads(found.read_text())["ratios"]
    assert len(ratios) == 7
    assert all(ratio["ratio"] > 0 for ratio in ratios)
