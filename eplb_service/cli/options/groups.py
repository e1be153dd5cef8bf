"""Options that belong together as one dataclass: declared once, checked once, given to a command as one value."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from typer.models import ParameterInfo

Command = TypeVar("Command", bound=Callable[..., None])


def option_groups(command: Command) -> Command:
    """Give a command each parameter that is a dataclass as separate options, one per field.

    A field is declared as an option is, ``Annotated[type, typer.Option(...)]``, with its default. The class's
    ``SECTION``, where it has one, is the heading that help lists the group under.
    """
    signature = inspect.signature(command)
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: hint
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in groups:
            parameters += _options_of(groups[parameter.name])
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
        else:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=keyword, annotation=hints[parameter.name]))

    @functools.wraps(command)
    def with_groups(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
        command(**values)

    # typer reads a command's options off its signature.
    del with_groups.__wrapped__
    parameters.sort(key=lambda parameter: parameter.kind is inspect.Parameter.VAR_KEYWORD)
    with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {
        parameter.name: Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        for parameter in parameters
    }
    return typing.cast("Command", with_groups)


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    section = getattr(group, "SECTION", None)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=_in_section(hints[field.name], section),
        )
        for field in dataclasses.fields(group)
    ]


def _in_section(annotation: Any, section: str | None) -> Any:
    """The annotation with its option listed under ``section``."""
    kind, *metadata = typing.get_args(annotation)
    placed = []
    for entry in metadata:
        if isinstance(entry, ParameterInfo) and section is not None:
            entry = copy.copy(entry)
            entry.rich_help_panel = section
        placed.append(entry)
    return Annotated.__class_getitem__((kind, *placed))  # type: ignore[attr-defined]
