"""Tests of the docs' examples: the first one runs, and all commands, options and variables exist."""

import re
from pathlib import Path

import numpy as np
import pytest

from eplb_service.cli import main
from eplb_service.io.synthetic import synthetic_heat
from tools.docs_reference.command_line import commands
from tools.docs_reference.settings import settings_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
COMMANDS = {
    command.name: {flag for option in command.options for flag in option.flags} for command in commands()
}

SETTINGS = settings_page()


def blocks(page, kind=r"[\w ]*"):
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def command_lines(page):
    """Yield every ``eplb ...`` command in a page's code blocks. A line may contain two commands."""
    for block in blocks(page):
        for line in block.splitlines():
            for command_line in re.split(r"\s{2,}(?=eplb |#)", line.partition(" #")[0]):
                if command_line.startswith("eplb "):
                    yield command_line.strip()


def name_of(line):
    names = [name for name in COMMANDS if f"{line} ".startswith(f"{name} ")]
    return max(names, key=len, default=None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_options_and_variables_exist(page):
    for line in command_lines(page):
        name = name_of(line)
        assert name, line
        assert set(re.findall(r"(?<!\S)--[\w-]+", line)) - COMMANDS[name] == set(), line
    for variable in re.findall(r"\bEPLB_[A-Z_]*[A-Z]\b", page.read_text()):
        assert f"`{variable}`" in SETTINGS, variable


def test_the_pages_contain_commands():
    assert len([line for page in PAGES for line in command_lines(page)]) > 30


def test_the_first_example_improves_the_balance(capsys):
    example = blocks(ROOT / "docs/index.md", "python")[0]
    names = {}
    exec(compile(example, "docs/index.md", "exec"), names)
    solution = names["solution"]
    assert solution.phy2log.shape == (2, 8, 5)
    assert solution.par_after < solution.par_before
    assert "peak-to-average" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["solve", "advise", "replay", "sweep", "bench"])
def test_every_command_finds_the_policy_of_an_installed_package(command, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/reference/api.md"
    toml = blocks(page, "toml")[0]
    source = blocks(page, "python")[0]
    assert toml.startswith('[project.entry-points."eplb.policies"]\n')
    entry = toml.splitlines()[1].replace('"', "")
    package = tmp_path / "my_policies-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 0.1\n")
    (package / "entry_points.txt").write_text(f"[eplb.policies]\n{entry}\n")
    (tmp_path / "my_policies.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    heat = tmp_path / "heat.npz"
    np.savez(heat, heat=synthetic_heat("static", 64, 2, 8, tokens=256, top_k=2, seed=3))
    trace = [heat] if command == "sweep" else ["--heat", heat]
    options = {
        "solve": ["--slots", 2],
        "advise": ["--redundant", 0, "--window", 16],
        "bench": ["--window", 16, "--peers", "none"],
    }.get(command, ["--window", 16, "--interval", 16, "--workers", 1])
    arguments = [command, *trace, "--ranks", 4, "--policy", "swap-first", "--json", *options]
    assert main.run([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    assert "swap-first" in capsys.readouterr().out
