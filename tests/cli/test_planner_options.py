"""Every planner setting is declared once and is an option of every command that decides, with the same default."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from eplb_core.planner.settings import PlannerSettings, planner_settings
from eplb_service.cli.main import load_command
from eplb_service.control.server.settings import load_settings
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb

SERVE_ONLY = {"fitted_curve", "estimate_device"}
ABSENT = {
    "replay": {"policy", *SERVE_ONLY},
    "advise": {"policy", "move_price", *SERVE_ONLY},
    "solve": {"policy", *SERVE_ONLY},
    "sweep": {"policy", *SERVE_ONLY},
    "serve": set(),
}
"""Settings that a command declares itself or that do not affect it."""


@pytest.mark.parametrize("command", ABSENT)
def test_every_setting_is_an_option_of_every_command_that_it_affects(command):
    options = {option.name: option for option in load_command(command).params}
    for setting in fields(PlannerSettings):
        if setting.name not in ABSENT[command]:
            option = options[setting.name]
            assert f"--{setting.name.replace('_', '-')}" in option.opts
            assert setting.metadata["help"] in option.help
            assert option.default == setting.default
    assert {"fitted_curve", "estimate_device"} & options.keys() == SERVE_ONLY - ABSENT[command]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("solve --help", "at which a layer is left unchanged (cherry-picking)"),
        ("serve --listen nowhere", "setting listen: expected host:port"),
    ],
)
def test_help_works_without_docstrings(arguments, shown):
    """``python -OO`` strips docstrings, which must not be the source of the help."""
    command = [sys.executable, "-OO", "-m", "eplb_service.cli.main", *arguments.split()]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert shown in " ".join((done.stdout + done.stderr).split())


def test_option_defaults_equal_the_default_settings():
    defaults = {option.name: option.default for option in fields(PlannerSettings)}
    assert planner_settings(defaults) == load_settings({}, environment={}).planner() == PlannerSettings()


@pytest.mark.parametrize(("text", "price"), [("auto", "auto"), ("0.3", 0.3), (0.3, 0.3), (0, 0.0)])
def test_the_move_price_is_auto_or_a_number(text, price, tmp_path):
    assert planner_settings({"move_price": text}).move_price == price
    assert load_settings({"move_price": text}, environment={}).planner().move_price == price
    (tmp_path / "eplb.yaml").write_text(f"move_price: {text}\n")
    assert load_settings({}, tmp_path / "eplb.yaml", {}).planner().move_price == price


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, heat=synthetic_heat("drift", 60, 2, 16, tokens=256, top_k=2, seed=1))
    return path


def test_a_replay_applies_its_options(trace, capsys):
    shape = ("--ranks", 4, "--slots", 5, "--window", 20, "--policy", "flashlb")
    arguments = ("replay", "--heat", trace, *shape, "--json")
    code, usual, _ = eplb(capsys, *arguments)
    assert code == 0
    settings = ("--min-gain", 9, "--split", "even", "--seed", 2)
    code, tuned, _ = eplb(capsys, *arguments, *settings, "--nodes", 2, "--token-group", 2)
    assert code == 0
    moves = [json.loads(text)["policies"]["flashlb"]["moves"] for text in (usual, tuned)]
    assert moves[0] > 0
    assert moves[1] == 0
