"""Options of commands: a field or a parameter declares each one with its help, and this module makes typer's of it."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., None])

SEVERAL = "VALUE,..."
"""Placeholder of an option that takes several values, with commas between."""
RESULTS = "Results"
"""Heading of the options on what is printed and written."""

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class UserError(Exception):
    """A user's mistake, in one line: what was wrong and how to correct it."""


def option(default: Any = MISSING, help: str = "", *flags: str, **details: Any) -> Any:
    """Declare an option, as the value of a dataclass's field or of a command's parameter; required without a default.

    ``flags`` take the place of the one made of the name. Of ``details``, ``section`` is the heading in the help, of the
    options that follow, too; all others are ``typer.Option``'s.
    """
    return field(default=default, metadata={"help": help, "flags": flags, **details})


def argument(default: Any = MISSING, help: str = "") -> Any:
    """Declare an argument of a command, which is given by its place."""
    return field(default=default, metadata={"help": help, "argument": True})


JSON = option(False, "Print JSON instead of text.", "--json", section=RESULTS)
"""``json`` of the commands that print either."""


def takes_options(*more: inspect.Parameter) -> Callable[[Command], Command]:
    """Make a command's declarations the options that typer reads off its signature.

    A parameter that is a dataclass stands for one option per field, under the heading ``SECTION`` of the class, and
    arrives as one value. The options ``more`` arrive in the command's ``**`` parameter.
    """

    def decorated(command: Command) -> Command:
        hints = typing.get_type_hints(command)
        groups: dict[str, Any] = {}
        made: list[inspect.Parameter] = []
        section = None
        for parameter in inspect.signature(command).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                continue
            kind = hints[parameter.name]
            if is_dataclass(kind):
                groups[parameter.name] = kind
                made += _options_of(kind)
            else:
                section = parameter.default.metadata.get("section", section)
                made.append(_declared(parameter.name, kind, parameter.default, section))

        @functools.wraps(command)
        def with_groups(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
            command(**values)

        del with_groups.__wrapped__
        made += more
        with_groups.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
        return typing.cast("Command", with_groups)

    return decorated


def setting_option(name: str, kind: Any, default: Any, help: str, **details: Any) -> inspect.Parameter:
    """The option of one setting: ``--some-name``, and ``--no-some-name`` beside it where it is a ``bool``.

    Parameters
    ----------
    name, kind, default, help
        Those of the setting. Text is parsed as ``kind``, and stays text where that is none of typer's types.
    details
        As for ``option``.
    """
    flag = f"--{name.replace('_', '-')}"
    flags = details.pop("flags", ()) or ([f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag])
    details = {"metavar": _metavar(kind), "rich_help_panel": details.pop("section", None), **details}
    info = typer.Option(... if default is MISSING else default, *flags, help=help, **details)
    return _parameter(name, kind, default, info)


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


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group)
    for one in fields(group):
        yield _declared(one.name, hints[one.name], one, getattr(group, "SECTION", None))


def _declared(name: str, kind: Any, declared: Field[Any], section: str | None = None) -> inspect.Parameter:
    details = {"section": section, **declared.metadata}
    if details.pop("argument", False):
        info = typer.Argument(... if declared.default is MISSING else declared.default, help=details["help"])
        return _parameter(name, kind, declared.default, info)
    return setting_option(name, kind, declared.default, **details)


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    annotation = _parsed_type(kind) | None if default is None else _parsed_type(kind)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)


def _parsed_type(kind: Any) -> Any:
    """The type that typer parses the shell's text as; what may be several things, or is none of typer's, is text."""
    choices = _choices(kind)
    plain = len(choices) == 1 and (choices[0] in (bool, *_METAVARS) or typing.get_origin(choices[0]) is list)
    return choices[0] if plain else str


def _metavar(kind: Any) -> str | None:
    """Placeholder of a value in the help."""
    choices = _choices(kind)
    if any(typing.get_origin(choice) is Literal for choice in choices):
        return "|".join(
            "|".join(typing.get_args(choice)) if typing.get_origin(choice) is Literal else "NUMBER"
            for choice in choices
        )
    return _METAVARS.get(_parsed_type(kind))


def _choices(kind: Any) -> list[Any]:
    """Types that a value may have, where there is one."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return [one for one in (typing.get_args(kind) if union else (kind,)) if one is not types.NoneType]
