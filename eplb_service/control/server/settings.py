"""Settings of the service. Each field declares one flag, one environment variable and one YAML key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)

from eplb_core.cost.curve import CostCurve
from eplb_core.planner.settings import (
    DECISION_INTERVAL,
    WINDOW_STEPS,
    NumberOrAuto,
    PlannerSettings,
    number_or_auto,
    planner_settings,
)
from eplb_core.planner.settings import SettingsError as PlannerSettingsError
from eplb_core.wire.channel import DEFAULT_ADDRESS, is_loopback
from eplb_core.wire.codec import MAX_MESSAGE_BYTES
from eplb_service.control.server.lease.leadership import checked_lease

ENVIRONMENT_PREFIX = "EPLB_"
_CLIENT_VARIABLES = re.compile("EPLB_(AGENT_.*|ADDRESS|CONFIG|TLS_CA|TLS_CLIENT_CERT|TLS_CLIENT_KEY)")
"""Variables of agents and of client commands, which are not settings of the service."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_MAX_REPORT_STEPS = 1024


class SettingsError(ValueError):
    """Raised for invalid settings. The error message names the key, its source and the remedy."""


def _checked_address(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"expected host:port, for example {DEFAULT_ADDRESS} or [::1]:0")
    return address


def _checked_report_steps(value: Any) -> Any:
    if value == "auto" or (str(value).isdecimal() and 1 <= int(value) <= _MAX_REPORT_STEPS):
        return value
    raise ValueError(f"expected 1 to {_MAX_REPORT_STEPS} steps, or auto")


_Address = Annotated[str, AfterValidator(_checked_address)]
_ReportSteps = Annotated[int | Literal["auto"], BeforeValidator(_checked_report_steps)]
_LeaseName = Annotated[str, AfterValidator(checked_lease)]


_TYPES: dict[Any, Any] = {
    NumberOrAuto: Annotated[NumberOrAuto, BeforeValidator(number_or_auto)],
    CostCurve | None: str | None,
}
"""Types of planner settings before they are parsed."""
_PLANNER_FIELDS: dict[str, Any] = {
    option.name: (
        _TYPES.get(option.type, option.type),
        Field(option.default, description=option.metadata["help"]),
    )
    for option in fields(PlannerSettings)
}
_PlannerFields: type[BaseModel] = create_model("_PlannerFields", **_PLANNER_FIELDS)


class ServiceSettings(_PlannerFields):
    """Settings of a running service. Each is a flag of ``eplb serve``, a variable ``EPLB_...`` and a YAML key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: _Address = Field(
        DEFAULT_ADDRESS,
        description="Address (host:port) for agents and operators; port 0 selects a free port.",
    )
    metrics: _Address = Field(
        "127.0.0.1:9464",
        description="Address (host:port) of /metrics, and of the web page unless page is set.",
    )
    page: _Address | None = Field(
        None, description="Address (host:port) of the web page, with TLS if tls_cert is set."
    )
    store: str | None = Field(
        None,
        min_length=1,
        description="SQLite file for leader terms, deployments and plans, or ':memory:'; by default eplb/state.sqlite3 "
        "in $XDG_STATE_HOME or ~/.local/state.",
    )
    window_steps: int = Field(
        WINDOW_STEPS,
        ge=1,
        le=65536,
        description="Maximum number of steps that a decision uses; older steps are used only if their heat is similar.",
    )
    decision_interval: int = Field(
        DECISION_INTERVAL,
        ge=1,
        description="Steps before the first decision, and the maximum between decisions; fewer after a change in heat.",
    )
    cpu_share: float = Field(
        0.1,
        gt=0,
        description="CPU cores that a deployment's decisions may use on average; decisions are delayed if necessary.",
    )
    prior: str | None = Field(
        None,
        description="Heat for first plans, as DEPLOYMENT=SOURCE,...; a source is another deployment or a trace.",
    )
    report_steps: _ReportSteps = Field(
        "auto",
        description=f"Steps per heat report, 1 to {_MAX_REPORT_STEPS}; auto: 16, and up to 64 with many ranks.",
    )
    heat_phase: Literal["all", "prefill", "decode"] = Field(
        "all",
        description="Steps to plan for: all, prefill (at least one rank prefills) or decode (no rank prefills).",
    )
    heartbeat_seconds: float = Field(
        2.0, ge=0.05, le=60, description="Seconds between an agent's heartbeats."
    )
    forget_after_seconds: float = Field(
        7 * 86400.0,
        ge=0,
        description=(
            "Seconds without a connected rank after which a deployment is forgotten, unless it is paused; 0: never."
        ),
    )
    max_message_bytes: int = Field(
        16 << 20, ge=1 << 16, le=MAX_MESSAGE_BYTES, description="Maximum size of an agent's request."
    )
    max_streams: int = Field(8192, ge=1, description="Maximum number of open calls, streams and connections.")
    max_streams_per_peer: int = Field(
        1024,
        ge=1,
        description="Maximum number of open calls and streams per host, for callers without credentials.",
    )
    max_heat_bytes: int = Field(
        2 << 30, ge=1 << 20, description="Memory limit for the heat of all deployments."
    )
    solve_timeout_seconds: float = Field(120.0, gt=0, description="Seconds after which a decision times out.")
    auth_token: SecretStr | None = Field(
        None, description="Shared token that every call must send as 'authorization: Bearer TOKEN'."
    )
    tls_cert: Path | None = Field(
        None, description="PEM certificate chain; set it together with tls_key to serve TLS."
    )
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of the CA that signs client certificates, which are then required (mutual TLS).",
    )
    credentials: Path | None = Field(
        None, description="YAML file of credentials by role, deployment and rank; reloaded when it changes."
    )
    insecure: bool = Field(
        False, description="Allow addresses other than loopback without TLS or credentials."
    )
    lease: _LeaseName | None = Field(
        None, description="Lead only while holding this lease: file:PATH or kubernetes:NAME."
    )
    health: _Address | None = Field(
        None,
        description="Address (host:port) that serves only gRPC health checks, without TLS or credentials.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of log lines."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ServiceSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca requires tls_cert and tls_key")
        authenticates = self.auth_token is not None or self.credentials is not None
        if not (self.insecure or is_loopback(self.listen) or (self.tls_cert is not None and authenticates)):
            raise ValueError(
                f"listen {self.listen} is reachable from other hosts: set tls_cert and tls_key, and credentials or "
                "auth_token; or set insecure if every host on the network may call the service"
            )
        if self.auth_token is not None and not self.auth_token.get_secret_value():
            raise ValueError("auth_token is empty; leave it unset to require no token")
        try:
            self.planner()
        except PlannerSettingsError as error:
            raise ValueError(str(error)) from error
        return self

    def planner(self) -> PlannerSettings:
        """Return the settings of the planner."""
        return planner_settings(self.model_dump(include=set(_PLANNER_FIELDS)))


def default_store(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default path of the store; raises ``SettingsError`` if this user has no home directory."""
    state_home = Path(environment.get("XDG_STATE_HOME", ""))
    try:
        # The XDG specification requires relative paths to be ignored.
        folder = state_home if state_home.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise SettingsError(
            "this user has no home directory for the store; specify a file with --store"
        ) from error
    return folder / "eplb" / "state.sqlite3"


def load_settings(
    flags: Mapping[str, Any], config: Path | None = None, environment: Mapping[str, str] = os.environ
) -> ServiceSettings:
    """Merge and validate the settings.

    Flags take precedence over ``EPLB_...`` variables, and both take precedence over the YAML file. Raises
    ``SettingsError`` if a key is unknown or a value is invalid; the error message is one line that names the key.

    Parameters
    ----------
    flags
        Values of command-line flags, keyed by setting; ``None`` if a flag is absent.
    config
        YAML file of settings, if any.
    environment
        Environment variables.

    Examples
    --------
    >>> settings = load_settings({"window_steps": 64}, environment={"EPLB_WINDOW_STEPS": "32", "EPLB_SEED": "7"})
    >>> settings.window_steps, settings.seed
    (64, 7)
    """
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in ServiceSettings.model_fields}
    for variable in environment:
        is_setting = variable.startswith(ENVIRONMENT_PREFIX) and not _CLIENT_VARIABLES.fullmatch(variable)
        if is_setting and variable not in variables:
            raise SettingsError(f"unknown environment variable {variable}{_nearest(variable, variables)}")
    values = {
        **(_read_yaml(config) if config is not None else {}),
        **{name: environment[variable] for variable, name in variables.items() if variable in environment},
        **{name: value for name, value in flags.items() if value is not None},
    }
    try:
        return ServiceSettings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_problem_line(problem) for problem in error.errors())) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply; it must consist of 'key: value' lines") from None
    except Exception as error:
        # Some values, such as impossible dates, raise errors other than YAMLError.
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"{path} must consist of 'key: value' lines")
    names = ServiceSettings.model_fields
    for key in content:
        if key not in names:
            raise SettingsError(f"{path}: unknown setting {key!r}{_nearest(key, names)}")
    return content


def _nearest(key: str, names: Iterable[str]) -> str:
    """Return a suffix for an error message that suggests the most similar name."""
    close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; `eplb serve --help` lists all settings"


def _problem_line(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    key = ".".join(map(str, problem["loc"]))
    shown = "" if key == "auth_token" else f" (got {problem['input']!r})"
    return f"setting {key}: {message[0].lower()}{message[1:]}{shown}"
