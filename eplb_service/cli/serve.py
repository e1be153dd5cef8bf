"""``eplb serve``: run the service. Every field of its settings is a flag."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import structlog
import typer

from eplb_core.planner.settings import PlannerSettings
from eplb_service.cli.options import UserError, only_if_given, option, setting_option, takes_options
from eplb_service.cli.planner_options import PLANNER, unused_heat
from eplb_service.control.server.lease.errors import LeaseError, LeaseLostError
from eplb_service.control.server.listening import ListenError
from eplb_service.control.server.service import RunningService, serve_until_stopped
from eplb_service.control.server.settings import ServiceSettings, SettingsError, load_settings
from eplb_service.control.server.store_file import StoreError
from eplb_service.telemetry.logs import configure_logs

_log = structlog.get_logger(__name__)

_LEASE_LOST_EXIT_CODE = 1


def _flags() -> list[Any]:
    """Return the service's own flags, followed by the planner's flags."""
    planner = PlannerSettings.__dataclass_fields__
    return [
        setting_option(
            name,
            field.annotation,
            field.default,
            field.description or "",
            section=PLANNER if name in planner else None,
            callback=only_if_given,
        )
        for name, field in sorted(ServiceSettings.model_fields.items(), key=lambda item: item[0] in planner)
    ]


@takes_options(*_flags())
def serve(
    config: Path | None = option(
        None, "YAML file of settings, one 'key: value' per line.", envvar="EPLB_CONFIG", show_envvar=False
    ),
    **flags: Any,
) -> None:
    """Run the control plane that agents connect to.

    A flag takes precedence over its environment variable (--log-level over EPLB_LOG_LEVEL), and the variable over the
    --config file ($EPLB_CONFIG).
    """
    try:
        settings = load_settings(flags, config)
        configure_logs(settings.log_level)
        if settings.window_steps < settings.decision_interval:
            _log.warning(
                "window_shorter_than_interval",
                reason=unused_heat(settings.window_steps, settings.decision_interval)
                + "; set window_steps to at least decision_interval to use all of them",
            )
        if flags.get("auth_token") is not None:
            _log.warning(
                "token_on_command_line",
                reason="every user on this machine can read the --auth-token value in the process list; "
                "pass a credentials file with --credentials, or set EPLB_AUTH_TOKEN",
            )
        asyncio.run(serve_until_stopped(settings, _announce))
    except LeaseLostError as error:
        # This is not a user error. A process supervisor restarts the service, which then waits for the lease.
        typer.echo(f"eplb: error: {error}", err=True)
        raise typer.Exit(_LEASE_LOST_EXIT_CODE) from error
    except (SettingsError, StoreError, ListenError, LeaseError) as error:
        raise UserError(str(error)) from error


def _announce(service: RunningService) -> None:
    typer.echo(
        f"eplb: agents and operators at {service.address}, metrics at http://{service.metrics_address}/metrics, "
        f"web page at {service.page_url}"
    )
