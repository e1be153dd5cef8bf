"""Every planner option changes the results of every command that offers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve, write_curves
from eplb_core.placement import Placement
from eplb_core.planner.settings import PlannerSettings
from eplb_service.cli import advise, main, prove, replay, solve, sweep
from eplb_service.io.synthetic import synthetic_heat

SHAPE = ("--ranks", "8", "--redundant", "8")
SCHEDULE = ("--window", "20", "--interval", "20", "--policy", "flashlb", "--no-hindsight", "--workers", "1")
COMMANDS = {
    "solve": ("--heat", "heat.npz", *SHAPE, "--placement", "placement.npz"),
    "replay": ("--heat", "heat.npz", *SHAPE, *SCHEDULE),
    "prove": ("--heat", "heat.npz", *SHAPE, "--window", "20", "--interval", "20", "--workers", "1"),
    "sweep": ("heat.npz", *SHAPE, *SCHEDULE),
    "advise": ("--heat", "heat.npz", *SHAPE, "--window", "20", "--workers", "1"),
}
VALUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "par_threshold": ("9", ()),
    "min_gain": ("9", ()),
    "max_layers": ("1", ()),
    "move_price": ("9", ()),
    "link_bandwidth": ("0.001", ()),
    "layer_ms": ("0.0001", ()),
    "split": ("even", ()),
    "deal_width": ("1", ("--split", "deal")),
    "expert_groups": ("8", ("--nodes", "2")),
    "cost_curve": ("curve.json", ()),
    "seed": ("1", ()),
    "budget_ms": ("0.000001", ()),
}
"""For each option, a value other than the default, and the options that it needs to have an effect."""
WITHOUT_EFFECT = {"threads": "results do not depend on the number of threads"}
ECHOES = {
    "assumptions",
    "costs",
    "settings",
    "move_price",
    "seconds",
    "solve_ms",
    "solve_ms_mean",
    "solve_ms_max",
}
"""Output keys that repeat options or depend on the machine."""


def options_of(command: str) -> list[str]:
    settings = {field.name for field in fields(PlannerSettings)} - {"policy", *WITHOUT_EFFECT}
    return [option.name for option in main.load_command(command).params if option.name in settings]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs a command on a small trace and returns its JSON output without ``ECHOES``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("effects"))
        for module in (advise, prove, replay, solve, sweep):
            patch.setattr(module, "compile_solver", lambda: None)
        np.savez("heat.npz", heat=synthetic_heat("static", 84, 2, 16, tokens=256, top_k=2, seed=1))
        np.savez("placement.npz", phy2log=Placement.linear(2, 16, 8, 3).phy2log_LRS)
        write_curves(Path("curve.json"), [CostCurve(0.0, 1.0, 0.0, 1.0)])

        @cache
        def run(command: str, *arguments: str) -> Any:
            output = StringIO()
            with redirect_stdout(output):
                assert main.run([command, *COMMANDS[command], *arguments, "--json"]) == 0
            return without_echoes(json.loads(output.getvalue()))

        yield run


def without_echoes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_echoes(inner) for name, inner in value.items() if name not in ECHOES}
    return [without_echoes(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command in COMMANDS for option in options_of(command)]
)
def test_an_option_changes_the_results(command: str, option: str, results_of: Callable[..., Any]) -> None:
    value, needed = VALUES[option]
    changed = results_of(command, *needed, f"--{option.replace('_', '-')}", value)
    assert changed != results_of(command, *needed)
