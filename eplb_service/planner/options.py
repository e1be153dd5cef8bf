"""The planner's settings as options: name, type, default and help, for commands and service alike.

``PlannerSettings`` is the one place that declares them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from eplb_service.cost.curve import CostCurve, CurveError
from eplb_service.cost.curve_file import read_curve
from eplb_service.planner.settings import AUTO, NumberOrAuto, PlannerSettings, SettingsError


@dataclass(frozen=True)
class PlannerOption:
    """One setting.

    Parameters
    ----------
    name
        That of its field.
    kind
        What its text is parsed as: ``str``, ``int``, ``float`` or ``bool``, or the union of a number and ``"auto"``.
        Several numbers are text with commas.
    default
        Of that kind, or ``None``. A cost curve is the text that names its file.
    help
        What it does, in plain text.
    """

    name: str
    kind: Any
    default: Any
    help: str


@cache
def planner_options() -> tuple[PlannerOption, ...]:
    """All settings, in order."""
    types_of = typing.get_type_hints(PlannerSettings)
    return tuple(
        PlannerOption(field.name, _kind(types_of[field.name]), _plain(field.default), field.metadata["help"])
        for field in fields(PlannerSettings)
    )


def planner_settings(values: Mapping[str, Any]) -> PlannerSettings:
    """Settings of options by name; those left out have their defaults.

    Raises
    ------
    SettingsError
        On a value that no planner could follow.
    """
    types_of = typing.get_type_hints(PlannerSettings)
    return PlannerSettings(**{name: _parsed(name, value, types_of[name]) for name, value in values.items()})


def number_or_auto(value: Any) -> NumberOrAuto:
    """What stands for such a setting in text or a file; raises ``ValueError`` where it is neither."""
    if value == AUTO:
        return AUTO
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number, or auto") from None


def _kind(annotation: Any) -> Any:
    if annotation == NumberOrAuto:
        return annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return str if typing.get_origin(annotation) is tuple or annotation is CostCurve else annotation


def _plain(value: Any) -> Any:
    return ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else value


def _parsed(name: str, value: Any, annotation: Any) -> Any:
    if annotation == NumberOrAuto:
        try:
            return number_or_auto(value)
        except ValueError as error:
            raise SettingsError(f"{name} is {value!r}; {error}") from error
    if isinstance(value, str) and CostCurve in typing.get_args(annotation):
        try:
            return read_curve(value)
        except CurveError as error:
            raise SettingsError(str(error)) from error
    if typing.get_origin(annotation) is not tuple or not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise SettingsError(f"{name} is {value!r}; expected numbers separated by commas") from error
