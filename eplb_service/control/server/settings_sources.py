"""Where the service's settings come from: flags > environment ``EPLB_*`` > YAML file > defaults."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from eplb_service.control.server.settings import ENVIRONMENT_PREFIX, ServiceSettings, SettingsError

_OTHERS_PREFIXES = ("EPLB_AGENT_",)
_OTHERS_VARIABLES = {
    "EPLB_ADDRESS",
    "EPLB_CONFIG",
    "EPLB_TLS_CA",
    "EPLB_TLS_CLIENT_CERT",
    "EPLB_TLS_CLIENT_KEY",
}


def load_settings(
    flags: Mapping[str, Any], config: Path | None = None, environment: Mapping[str, str] = os.environ
) -> ServiceSettings:
    """Settings from all four sources; ``flags`` that are ``None`` were not given.

    Raises
    ------
    SettingsError
        With one line that names the key where one is unknown or its value will not do.
    """
    from_file = _read_yaml(config) if config is not None else {}
    _check_environment(environment)

    class Loaded(ServiceSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=from_file)

    try:
        return Loaded(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise SettingsError("; ".join(_problem_line(problem) for problem in error.errors())) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"{path} must hold 'key: value' lines")
    known = ServiceSettings.model_fields
    for key in content:
        if key not in known:
            raise SettingsError(f"{path}: unknown setting {key!r}{_nearest(key, known)}")
    return content


def _check_environment(environment: Mapping[str, str]) -> None:
    known = {ENVIRONMENT_PREFIX + name.upper() for name in ServiceSettings.model_fields}
    for variable in environment:
        foreign = not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(_OTHERS_PREFIXES)
        if not foreign and variable not in known | _OTHERS_VARIABLES:
            raise SettingsError(f"unknown environment variable {variable}{_nearest(variable, known)}")


def _nearest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; `eplb serve --help` lists those that are known"


def _problem_line(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    key = ".".join(str(part) for part in problem["loc"])
    shown = "" if key == "auth_token" else f" (got {problem['input']!r})"
    return f"setting {key}: {message[0].lower()}{message[1:]}{shown}"
