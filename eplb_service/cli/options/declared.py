"""Makes command-line options of declared settings: the one way from a setting to its flag, for every command."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., None])


def setting_option(
    name: str,
    kind: Any,
    default: Any,
    help: str,
    *,
    panel: str | None = None,
    metavar: str | None = None,
    show_default: bool = True,
) -> inspect.Parameter:
    """The option of one setting: ``--some-name``, and ``--no-some-name`` beside it where it is a ``bool``.

    Parameters
    ----------
    name, kind, default, help
        Those of the setting; an option whose default is ``None`` need not be given.
    panel
        Heading under which help lists it.
    metavar
        What help shows for its value, where its type does not say enough.
    show_default
        Whether help names the default.
    """
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        default,
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=help,
        rich_help_panel=panel,
        metavar=metavar,
        show_default=show_default,
    )
    annotation = kind | None if default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def flag_type(annotation: Any) -> Any:
    """What the shell's text is parsed as for a setting of this type; what may be several things is text."""
    choices = _choices(annotation)
    return str if len(choices) > 1 or typing.get_origin(choices[0]) is Literal else choices[0]


def flag_metavar(annotation: Any) -> str | None:
    """What help shows for the value of a setting that may be one of several literals; ``None`` for any other."""
    choices = _choices(annotation)
    if not any(typing.get_origin(choice) is Literal for choice in choices):
        return None
    return "|".join(
        "|".join(typing.get_args(choice)) if typing.get_origin(choice) is Literal else "NUMBER"
        for choice in choices
    )


def _choices(annotation: Any) -> list[Any]:
    """What a value may be, where there is one."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    choices = typing.get_args(annotation) if union else (annotation,)
    return [choice for choice in choices if choice is not types.NoneType]


def takes_options(made: Sequence[inspect.Parameter]) -> Callable[[Command], Command]:
    """Give a command these options in place of its ``**`` parameter, after those that it declares itself."""

    def decorated(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        # typer reads a command's options off its signature.
        command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *made)}
        return command

    return decorated
