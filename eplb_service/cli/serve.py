"""``eplb serve``: every field of the service's settings is a flag, so that neither can know what the other does not."""

from __future__ import annotations

import asyncio
import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from eplb_service.cli.errors import UserError
from eplb_service.cli.planner_options import PANEL
from eplb_service.control.server.service import ListenError, RunningService, serve_until_stopped
from eplb_service.control.server.settings import (
    ENVIRONMENT_PREFIX,
    ServiceSettings,
    SettingsError,
    load_settings,
)
from eplb_service.control.server.store_file import StoreError
from eplb_service.planner.options import planner_options
from eplb_service.telemetry.logs import configure_logs


def serve(**flags: Any) -> None:
    """Run the control plane that agents connect to.

    A flag goes before its variable EPLB_..., that before the file of --config, that before the default.
    """
    try:
        settings = load_settings(flags, flags.pop("config"))
        configure_logs(settings.log_format, settings.log_level)
        asyncio.run(serve_until_stopped(settings, _announce))
    except (SettingsError, StoreError, ListenError) as error:
        raise UserError(str(error)) from error


def _announce(service: RunningService) -> None:
    typer.echo(
        f"eplb: agents and operators at {service.address}, metrics at http://{service.metrics_address}/metrics"
    )


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    variable = f"${ENVIRONMENT_PREFIX}{name.upper()}"
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        None,
        f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag,
        help=f"{field.description} ({variable if field.default is None else f'{variable}, default {field.default}'})",
        show_default=False,
        metavar=_metavar(field),
        rich_help_panel=PANEL if name in _PLANNER else None,
    )
    return _parameter(name, _flag_type(field.annotation), option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _flag_type(annotation: Any) -> Any:
    """What the shell's text is parsed as; the settings themselves check the value."""
    if isinstance(annotation, types.UnionType):
        annotation = next(choice for choice in typing.get_args(annotation) if choice is not types.NoneType)
    if annotation is SecretStr or typing.get_origin(annotation) is Literal:
        return str
    return annotation


def _metavar(field: FieldInfo) -> str | None:
    if typing.get_origin(field.annotation) is Literal:
        return "|".join(typing.get_args(field.annotation))
    return None


_PLANNER = {option.name for option in planner_options()}
_CONFIG = typer.Option(
    None,
    "--config",
    help="YAML file of settings, one 'key: value' a line. ($EPLB_CONFIG)",
    envvar="EPLB_CONFIG",
    show_envvar=False,
)
_FLAGS = [
    _parameter("config", Path, _CONFIG),
    # The service's own first, then those that all commands share.
    *(
        _flag(name, field)
        for name, field in sorted(ServiceSettings.model_fields.items(), key=lambda item: item[0] in _PLANNER)
    ),
]
# typer reads a command's flags off its signature.
serve.__signature__ = inspect.Signature(_FLAGS)  # type: ignore[attr-defined]
serve.__annotations__ = {flag.name: flag.annotation for flag in _FLAGS}
