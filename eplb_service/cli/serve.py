"""``eplb serve``: runs the service; every field of its settings is a flag."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from eplb_service.cli.errors import UserError
from eplb_service.cli.options.declared import flag_metavar, flag_type, setting_option, takes_options
from eplb_service.cli.options.planner import PANEL
from eplb_service.control.server.lease.interface import LeaseError, LeaseLostError
from eplb_service.control.server.listening.probes import ListenError
from eplb_service.control.server.service import RunningService, serve_until_stopped
from eplb_service.control.server.settings import ENVIRONMENT_PREFIX, ServiceSettings, SettingsError
from eplb_service.control.server.settings_sources import load_settings
from eplb_service.control.server.store.store_file import StoreError
from eplb_service.planner.options import planner_options
from eplb_service.telemetry.logs import configure_logs

_LEASE_LOST_EXIT_CODE = 1
_PLANNER = {option.name for option in planner_options()}


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of one setting: unset by default, so that environment and file may name it."""
    variable = f"${ENVIRONMENT_PREFIX}{name.upper()}"
    default = "" if field.default is None else f", default {field.default}"
    return setting_option(
        name,
        _kind(field.annotation),
        None,
        f"{field.description} ({variable}{default})",
        panel=PANEL if name in _PLANNER else None,
        metavar=flag_metavar(field.annotation),
        show_default=False,
    )


def _kind(annotation: Any) -> Any:
    """What the shell's text is parsed as; the settings themselves check the value."""
    kind = flag_type(annotation)
    return str if kind is SecretStr else kind


def _flags() -> list[inspect.Parameter]:
    """The service's own flags, then those of the planner, which other commands have too."""
    fields = sorted(ServiceSettings.model_fields.items(), key=lambda item: item[0] in _PLANNER)
    return [_flag(name, field) for name, field in fields]


@takes_options(_flags())
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of settings, one 'key: value' per line. ($EPLB_CONFIG)",
            envvar="EPLB_CONFIG",
            show_envvar=False,
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Run the control plane that agents connect to.

    A flag takes precedence over its variable EPLB_..., which takes precedence over the file of --config.
    """
    try:
        settings = load_settings(flags, config)
        configure_logs(settings.log_format, settings.log_level)
        asyncio.run(serve_until_stopped(settings, _announce))
    except LeaseLostError as error:
        # No mistake of a user's: whoever supervises the process starts it again, and it waits for the lease.
        typer.echo(f"eplb: error: {error}", err=True)
        raise typer.Exit(_LEASE_LOST_EXIT_CODE) from error
    except (SettingsError, StoreError, ListenError, LeaseError) as error:
        raise UserError(str(error)) from error


def _announce(service: RunningService) -> None:
    typer.echo(
        f"eplb: agents and operators at {service.address}, metrics at http://{service.metrics_address}/metrics, "
        f"web page at {service.page_url}"
    )
