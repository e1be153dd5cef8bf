"""Tests of the help: complete at 80 columns, with brackets unchanged and with examples that parse."""

import shlex

import pytest

from eplb_service.cli import main
from eplb_service.cli.main import COMMANDS

MAX_LINES = 180


def commands():
    for name in COMMANDS:
        command = main.load_command(name)
        yield name, command
        for inner, child in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", child


PARSERS = dict(commands())


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def help_of(capsys, name):
    assert main.run([*name.split(), "--help"]) == 0
    return capsys.readouterr().out


def text_of(value):
    """Remove whitespace, because lines may also be broken at hyphens."""
    return "".join(value.split())


@pytest.mark.parametrize(("name", "command"), PARSERS.items())
def test_help_at_80_columns_has_every_option_and_an_example(capsys, name, command):
    shown = help_of(capsys, name)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert shown.count("\n") <= MAX_LINES
    for option in command.params:
        assert text_of(option.help or "") in text_of(shown), option.name
        assert all(flag in shown for flag in option.opts if option.param_type_name == "option")
    examples = shown.partition("Examples:\n")[2].splitlines()
    assert examples
    assert all(line.startswith(f"    eplb {name}") for line in examples)


def test_options_are_in_their_sections_and_arguments_are_named(capsys):
    shown = help_of(capsys, "status")
    headings = [line for line in shown.splitlines() if line[:1].strip() and line.endswith(":")]
    assert headings == ["Arguments:", "Options:", "Connection to the service:", "Results:"]
    assert "--tls-ca" in shown.partition(headings[2])[2].partition(headings[3])[0]
    assert "--json" in shown.partition(headings[3])[2]
    assert shown.startswith("Usage: eplb status [OPTIONS] DEPLOYMENT\n")
    assert "\n  DEPLOYMENT  Name of" in shown
    # An option without a section joins the section of the previous option.
    shown = help_of(capsys, "replay")
    assert "--interval" in shown.partition("Policies and schedules:")[2].partition("Results:")[0]


@pytest.mark.parametrize("example", main.EXAMPLES)
def test_every_example_in_the_help_parses(example):
    program, name, *rest = shlex.split(example)
    command = PARSERS[name]
    if hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    assert program == "eplb"
    command.make_context(name, rest)
