"""Reference page for the settings, generated from the classes that define them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from eplb_core.planner.settings import PlannerSettings
from tools.docs_reference.command_line import commands
from tools.docs_reference.markdown import code, escaped, plain, table

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class Setting(NamedTuple):
    """Setting of the service or an agent. ``kind`` includes the value's bounds."""

    name: str
    variable: str
    kind: str
    default: str
    description: str


def service_settings() -> list[Setting]:
    """Return all settings of ``eplb serve``. Each is a flag, an environment variable and a YAML key."""
    from eplb_service.control.server.settings import ENVIRONMENT_PREFIX, ServiceSettings

    bounds = {option.name: option.metadata["bounds"] for option in fields(PlannerSettings)}
    return [
        _setting(name, ENVIRONMENT_PREFIX, field, **bounds.get(name, {}))
        for name, field in ServiceSettings.model_fields.items()
    ]


def agent_settings() -> list[Setting]:
    """Return all agent settings."""
    from worker_agent.settings import AgentSettings

    return [_setting(name, "EPLB_AGENT_", field) for name, field in AgentSettings.model_fields.items()]


def command_variables() -> dict[str, str]:
    """Return the commands' environment variables that are not service settings, with the help of their options."""
    service_variables = {setting.variable for setting in service_settings()}
    return {
        option.variable: option.help
        for command in commands()
        for option in command.options
        if option.variable and option.variable not in service_variables
    }


def _setting(name: str, prefix: str, field: Any, **bounds: float) -> Setting:
    for constraint in field.metadata:
        bounds |= {bound: getattr(constraint, bound) for bound in _SIGNS if hasattr(constraint, bound)}
    limits = [f"{_SIGNS[bound]} {value}" for bound, value in bounds.items()]
    kind = _kind(field.annotation)
    if field.default_factory is not None:
        default = f"{field.default_factory.__name__}()"
    else:
        default = "unset" if field.default is None else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
    return Setting(
        name, prefix + name.upper(), ", ".join([kind, *limits]), default, plain(field.description or "")
    )


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        choices = [choice for choice in typing.get_args(annotation) if choice is not types.NoneType]
        return " or ".join(_kind(choice) for choice in choices)
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(typing.get_args(annotation))
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    names |= {"Path": "path", "SecretStr": "secret text"}
    return names.get(text, text)


def settings_page() -> str:
    """Return the text of ``reference/settings.md``."""
    planner = set(PlannerSettings.__dataclass_fields__)
    service = service_settings()
    sections = [
        "# Settings\n\nThis page is generated from the settings classes.\n",
        "## Service\n\nEach setting is a flag of `eplb serve` (`listen` is `--listen`), an environment variable, and a "
        "key of the YAML file given with `--config`. A flag takes precedence over the variable, the variable over the "
        "file, and the file over the default. An unknown variable that begins with `EPLB_` and an unknown key are "
        "errors.\n",
        _settings_table(setting for setting in service if setting.name not in planner),
        "\n## Planner\n\nThese settings of the service control its decisions. `eplb solve`, `eplb replay` and "
        "`eplb advise` have options of the same names.\n",
        _settings_table(setting for setting in service if setting.name in planner),
        "\n## Agent\n\nThese are the fields of `AgentSettings`. Each is also an environment variable of the inference "
        "process. An argument takes precedence over the variable, and the variable over the default. At start-up, the "
        "ranks compare the settings that must be equal on all of them.\n",
        _settings_table(agent_settings()),
        "\n## Commands for a running service\n\nOptions of `eplb status` and similar commands can also be set by these "
        "variables.\n",
        table(
            ("variable", "meaning"),
            [(f"`{variable}`", escaped(text)) for variable, text in sorted(command_variables().items())],
        ),
    ]
    return "\n".join(sections) + "\n"


def _settings_table(settings: Iterable[Setting]) -> str:
    rows = [
        (
            f"`{setting.name}`",
            f"`{setting.variable}`",
            escaped(setting.kind),
            code(setting.default),
            escaped(setting.description),
        )
        for setting in settings
    ]
    return table(("setting", "variable", "value", "default", "meaning"), rows)
