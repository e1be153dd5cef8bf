"""Declaration of command options.

An option and its help text are declared in a dataclass field or a parameter. Commands share these declarations. The
help lists options by section and fits in 80 columns.
"""

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
"""Placeholder for an option that accepts several values, separated by commas."""
RESULTS = "Results"
"""Section for options about printed and written results."""

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: None}
_MAX_NAME = 22
"""Width of the name column, in characters. The help text of a longer name starts on the next line."""


class UserError(Exception):
    """Raised for a mistake by the user. The one-line message states the problem and how to correct it."""


def option(
    default: Any = ..., help: str = "", *flags: str, section: str | None = None, **details: Any
) -> Any:
    """Declare an option as the value of a dataclass field or of a command parameter.

    Parameters
    ----------
    default
        Default value. If omitted, the option is required.
    help
        Help text.
    flags
        Flags that replace the one derived from the name.
    section
        Section heading in the help; by default the heading of the command's preceding option.
    details
        Additional arguments for ``typer.Option``.
    """
    return typer.Option(default, *flags, help=help, rich_help_panel=section, **details)


def argument(default: Any = ..., help: str = "") -> Any:
    """Declare a positional argument of a command."""
    return typer.Argument(default, help=help)


JSON = option(False, "Print JSON instead of text.", "--json", section=RESULTS)
"""Option ``--json`` for commands that can print either text or JSON."""


def takes_options(*extra: inspect.Parameter) -> Callable[[Command], Command]:
    """Return a decorator that turns the parameters of a command into options that typer understands.

    A parameter whose type is a dataclass stands for one option per field, under the class's ``SECTION`` heading. The
    command receives these options as one value, and the options in ``extra`` through its ``**`` parameter.
    """

    def decorated(command: Command) -> Command:
        hints = typing.get_type_hints(command)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        parameters: list[inspect.Parameter] = []
        section = None
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                parameters += _options_of(groups[name])
            elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                # Commands share declarations, but each command has its own sections.
                declaration = copy.copy(parameter.default)
                section = declaration.rich_help_panel = declaration.rich_help_panel or section
                parameters.append(_parameter(name, hints[name], declaration))
        parameters += extra

        @functools.wraps(command)
        def with_groups(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            command(**values)

        del with_groups.__wrapped__
        with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return typing.cast("Command", with_groups)

    return decorated


def setting_option(name: str, kind: Any, default: Any, help: str, **details: Any) -> inspect.Parameter:
    """Return the option of one setting.

    ``kind`` is the type of the setting's value. The other arguments are the same as for ``option``.
    """
    return _parameter(name, kind, option(default, help, **details))


def only_if_given(context: typer.Context, flag: typer.CallbackParam, value: Any) -> Any:
    """Return ``None`` instead of a flag's default, so that other sources of the setting apply."""
    source = context.get_parameter_source(str(flag.name))
    return value if source is not None and source.name == "COMMANDLINE" else None


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    kinds = typing.get_type_hints(group)
    for field in fields(group):
        declaration: Any = field.default
        declaration.rich_help_panel = group.SECTION
        yield _parameter(field.name, kinds[field.name], declaration)


def _parameter(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    """Return the parameter in the form that typer reads.

    A union of several types, or a type unknown to typer, is parsed as text.
    """
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    members = typing.get_args(kind) if union else (kind,)
    choices = [member for member in members if member is not types.NoneType]
    parsed = choices[0] if len(choices) == 1 else str
    if parsed not in _METAVARS and typing.get_origin(parsed) not in (list, tuple):
        parsed = str
    default_metavar = _METAVARS.get(parsed) if isinstance(declaration, OptionInfo) else name.upper()
    declaration.metavar = declaration.metavar or default_metavar
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declaration, annotation=parsed)


class HelpCommand(TyperCommand):
    """Command whose help lists the options by section, in the order of their declarations."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line with plain argument names, without typer's braces."""
        return [piece.strip("{}").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, starting with the options that have no section."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append((str(parameter.name).upper(), record[1]))
            else:
                heading = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            write_section(formatter, heading, records)


def write_section(formatter: Any, heading: str, records: list[tuple[str, str]]) -> None:
    """Write names with their help under a heading; write nothing if ``records`` is empty."""
    if records:
        with formatter.section(heading):
            formatter.write_dl(records, col_max=_MAX_NAME)


def whole_numbers(name: str, text: str, minimum: int = 1) -> list[int]:
    """Parse whole numbers separated by commas.

    Parameters
    ----------
    name
        Flag of the option, for the error message.
    text
        Value of the option.
    minimum
        Lower bound on each number.

    Returns
    -------
    list of int
        The numbers in order, without duplicates.

    Raises
    ------
    UserError
        If an entry is not a whole number or is below ``minimum``.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isdecimal() and len(entry) < 10 and int(entry) >= minimum for entry in entries):
        raise UserError(
            f"Invalid value for '{name}': {text!r}; expected whole numbers of at least {minimum}, separated by commas"
        )
    return list(dict.fromkeys(int(entry) for entry in entries))


def one_of(what: str, value: str, choices: typing.Collection[str]) -> Any:
    """Return ``value`` if it is one of ``choices``; raise ``UserError`` otherwise.

    ``what`` is the start of the error message, such as ``--phase is``, and is followed by the value.
    """
    if value not in choices:
        raise UserError(f"{what} {value!r}; choose one of {', '.join(choices)}")
    return value
