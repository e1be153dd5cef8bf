"""Every command's help is whole at 80 columns: nothing is cut, brackets are as written, and its examples are valid."""

import re
import shlex

import pytest

from eplb_service.cli import main
from eplb_service.cli.main import COMMANDS

MOST_LINES = 180


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
    """Without white space: lines are also broken at hyphens."""
    return "".join(value.split())


@pytest.mark.parametrize("name", PARSERS)
def test_it_fits_80_columns_and_cuts_nothing(capsys, name):
    shown = help_of(capsys, name)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert shown.count("\n") <= MOST_LINES


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_is_there_with_its_help_as_it_was_written(capsys, name):
    shown = text_of(help_of(capsys, name))
    command = PARSERS[name]
    options = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    for option in options:
        assert text_of(option.help or "") in shown, option.name
        for flag in option.opts if option.param_type_name == "option" else ():
            assert flag in shown
        variable = getattr(option, "envvar", None)
        if isinstance(variable, str) and option.show_envvar:
            assert variable in shown


def test_shapes_in_brackets_are_not_taken_for_markup(capsys):
    assert text_of("Expert in each slot [layers, slots], for tokens by slot") in text_of(
        help_of(capsys, "solve")
    )


@pytest.mark.parametrize(("command", "headings"), {
    "replay": ("Options", "Ranks and slots", "What is compared", "Results", "How decisions are made", "Examples"),
    "status": ("Arguments", "How the service is reached", "Examples"),
    "demo": ("What is served", "The service", "How decisions are made", "Results"),
}.items())  # fmt: skip
def test_options_are_grouped(capsys, command, headings):
    found = re.findall(r"^(\S.*):$", help_of(capsys, command), flags=re.MULTILINE)
    assert set(headings) <= set(found)


def test_the_list_of_commands_is_grouped(capsys):
    assert main.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, panel, summary) in COMMANDS.items():
        assert summary in shown
        assert f"{panel}:" in shown
        assert re.search(rf"^  {name} ", shown, flags=re.MULTILINE)


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_has_an_example(capsys, name):
    shown = help_of(capsys, name).partition("Examples:\n")[2].splitlines()
    assert shown
    assert all(line.startswith(f"  eplb {name}") for line in shown)


@pytest.mark.parametrize("example", main.EXAMPLES)
def test_examples_are_commands_that_parse(example):
    program, name, *rest = shlex.split(example)
    command = PARSERS[name]
    if hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    assert program == "eplb"
    command.make_context(name, rest)
