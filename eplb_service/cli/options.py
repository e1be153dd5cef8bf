"""Options of commands: a field or a parameter declares each one with its help, by section, whole at 80 columns."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

Command = TypeVar("Command", bound=Callable[..., None])

SEVERAL = "VALUE,..."
"""Placeholder of an option that takes several values, with commas between."""
RESULTS = "Results"
"""Heading of the options on what is printed and written."""

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: None}
_MAX_NAME = 22
"""Characters of an option beside which its help begins on the same line."""


class UserError(Exception):
    """A user's mistake, in one line: what was wrong and how to correct it."""


def option(
    default: Any = ..., help: str = "", *flags: str, section: str | None = None, **details: Any
) -> Any:
    """Declare an option, as the value of a dataclass's field or of a command's parameter; required without a default.

    ``flags`` take the place of the one made of the name; ``section`` is its heading in the help, by default that of
    the command's option before it; ``details`` are ``typer.Option``'s.
    """
    return typer.Option(default, *flags, help=help, rich_help_panel=section, **details)


def argument(default: Any = ..., help: str = "") -> Any:
    """Declare an argument of a command, which is given by its place."""
    return typer.Argument(default, help=help)


JSON = option(False, "Print JSON instead of text.", "--json", section=RESULTS)
"""``json`` of the commands that print either."""


def takes_options(*more: inspect.Parameter) -> Callable[[Command], Command]:
    """Make a command's declarations the options that typer reads off its signature.

    A parameter that is a dataclass stands for one option per field, under the heading ``SECTION`` of the class, and
    arrives as one value. The options ``more`` arrive in the command's ``**`` parameter.
    """

    def decorated(command: Command) -> Command:
        hints = typing.get_type_hints(command)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        made: list[inspect.Parameter] = []
        section = None
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                made += _options_of(groups[name])
            elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                # Commands share some declarations: each has its own of them.
                declared = copy.copy(parameter.default)
                section = declared.rich_help_panel = declared.rich_help_panel or section
                made.append(_parameter(name, hints[name], declared))
        made += more

        @functools.wraps(command)
        def with_groups(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
            command(**values)

        del with_groups.__wrapped__
        with_groups.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
        return typing.cast("Command", with_groups)

    return decorated


def setting_option(name: str, kind: Any, default: Any, help: str, **details: Any) -> inspect.Parameter:
    """The option of one setting; arguments as for ``option``, and the type that its text is parsed as."""
    return _parameter(name, kind, option(default, help, **details))


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    kinds = typing.get_type_hints(group)
    for one in fields(group):
        declared: Any = one.default
        declared.rich_help_panel = group.SECTION
        yield _parameter(one.name, kinds[one.name], declared)


def _parameter(name: str, kind: Any, declared: Any) -> inspect.Parameter:
    """The parameter that typer reads; what may be several things, or is none of typer's types, is text."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    choices = [one for one in (typing.get_args(kind) if union else (kind,)) if one is not types.NoneType]
    parsed = choices[0] if len(choices) == 1 else str
    if parsed not in _METAVARS and typing.get_origin(parsed) is not list:
        parsed = str
    name_of_value = _METAVARS.get(parsed) if isinstance(declared, OptionInfo) else name.upper()
    declared.metavar = declared.metavar or name_of_value
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=parsed)


class HelpCommand(TyperCommand):
    """A command whose help has its options by section, in the order in which they are declared."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments by their names alone, without typer's braces."""
        return [piece.strip("{}").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those without a section first."""
        found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                found["Arguments"].append((str(parameter.name).upper(), record[1]))
            else:
                found.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for heading, records in found.items():
            write_section(formatter, heading, records)


def write_section(formatter: Any, heading: str, records: list[tuple[str, str]]) -> None:
    """Write names with their help under a heading; nothing where there are none."""
    if records:
        with formatter.section(heading):
            formatter.write_dl(records, col_max=_MAX_NAME)


def whole_numbers(name: str, text: str, least: int = 1) -> list[int]:
    """Each whole number of ``text``, separated by commas, once and in order.

    Raises
    ------
    UserError
        Naming the option where one is none, or less than ``least``.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) >= least for part in parts):
        raise UserError(f"Invalid value for '{name}': {text!r} holds no whole numbers of {least} or more")
    return list(dict.fromkeys(int(part) for part in parts))


def one_of(what: str, value: str, choices: typing.Collection[str]) -> Any:
    """Return ``value``; raises ``UserError`` where it is none of ``choices``."""
    if value not in choices:
        raise UserError(f"{what} {value!r}; choose one of {', '.join(choices)}")
    return value
