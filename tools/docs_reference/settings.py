"""The reference of settings, from the classes that define them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

from tools.docs_reference.command_line import commands
from tools.docs_reference.markdown import code, escaped, plain, table


class Setting(NamedTuple):
    """One setting of the service or of an agent, with the constraints that its value is checked against."""

    name: str
    variable: str
    kind: str
    default: str
    description: str


def service_settings() -> list[Setting]:
    """Every setting of ``eplb serve``: flag, variable and YAML key alike."""
    from eplb_service.control.server.settings import ENVIRONMENT_PREFIX, ServiceSettings

    return [_setting(name, ENVIRONMENT_PREFIX, field) for name, field in ServiceSettings.model_fields.items()]


def agent_settings() -> list[Setting]:
    """Every setting of an agent."""
    from worker_agent.settings import AgentSettings

    return [_setting(name, "EPLB_AGENT_", field) for name, field in AgentSettings.model_fields.items()]


def command_variables() -> dict[str, str]:
    """Environment variables that commands read beside those of the settings, with the help of their options."""
    of_settings = {setting.variable for setting in service_settings()}
    return {
        option.variable: option.help
        for command in commands()
        for option in command.options
        if option.variable and option.variable not in of_settings
    }


def _setting(name: str, prefix: str, field: Any) -> Setting:
    bounds = [
        f"{sign} {bound}"
        for part in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (bound := getattr(part, attribute, None)) is not None
    ]
    kind = _kind(field.annotation)
    if field.default_factory is not None:
        default = f"{field.default_factory.__name__}()"
    else:
        default = "unset" if field.default is None else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
    return Setting(
        name, prefix + name.upper(), ", ".join([kind, *bounds]), default, plain(field.description or "")
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
    """``reference/settings.md``."""
    from eplb_core.planner.settings import PlannerSettings

    planner = set(PlannerSettings.__dataclass_fields__)
    service = service_settings()
    parts = [
        "# Settings\n\nGenerated from the settings classes; a test holds this page to them.\n",
        "## Service\n\nEach is a flag of `eplb serve` (`listen` is `--listen`), an environment variable, and a key of "
        "the YAML file given with `--config`. A flag goes before its variable, that before the file, that before the "
        "default. An unknown variable that begins with `EPLB_`, or an unknown key, is an error.\n",
        _settings_table(setting for setting in service if setting.name not in planner),
        "\n## Planner\n\nSettings of the service that say how decisions are made. `eplb solve`, `eplb replay` and "
        "`eplb advise` have them as options too, under the same names.\n",
        _settings_table(setting for setting in service if setting.name in planner),
        "\n## Agent\n\nFields of `AgentSettings`, each an environment variable of the inference process too; an "
        "argument goes before its variable, that before the default. What ranks must agree on they compare when "
        "they start.\n",
        _settings_table(agent_settings()),
        "\n## Commands that ask a running service\n\nOptions of `eplb status` and its like that are variables too.\n",
        table(
            ("variable", "meaning"),
            [(f"`{variable}`", escaped(text)) for variable, text in sorted(command_variables().items())],
        ),
    ]
    return "\n".join(parts) + "\n"


def _settings_table(settings: Iterable[Setting]) -> str:
    rows = [
        (f"`{one.name}`", f"`{one.variable}`", escaped(one.kind), code(one.default), escaped(one.description))
        for one in settings
    ]
    return table(("setting", "variable", "value", "default", "meaning"), rows)
