"""Settings of the service: what can be set, in which bounds, and what fits together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    create_model,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from eplb_service.control.server.lease.choose import checked_lease
from eplb_service.planner.options import number_or_auto, planner_options, planner_settings
from eplb_service.planner.settings import NumberOrAuto, PlannerSettings
from eplb_service.planner.settings import SettingsError as PlannerSettingsError
from eplb_service.wire.address import is_loopback
from eplb_service.wire.codec import MAX_MESSAGE_BYTES

ENVIRONMENT_PREFIX = "EPLB_"

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def _checked_address(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ValueError("an address is host:port, such as 127.0.0.1:50551 or [::1]:0")
    return address


Address = Annotated[str, AfterValidator(_checked_address)]


_MOST_REPORT_STEPS = 1024


def _checked_report_steps(value: Any) -> Any:
    if value == "auto":
        return value
    try:
        steps = int(value)
    except (TypeError, ValueError):
        steps = 0
    if not 1 <= steps <= _MOST_REPORT_STEPS:
        raise ValueError(f"a report has 1 to {_MOST_REPORT_STEPS} steps, or auto")
    return steps


ReportSteps = Annotated[int | Literal["auto"], BeforeValidator(_checked_report_steps)]
LeaseName = Annotated[str, AfterValidator(checked_lease)]


class SettingsError(ValueError):
    """Settings that no service could run with; the message names the key, its source and what to do."""


def _field_type(kind: Any, default: Any) -> Any:
    if kind == NumberOrAuto:
        return Annotated[kind, BeforeValidator(number_or_auto)]
    return kind if default is not None else kind | None


_PLANNER_FIELDS: dict[str, Any] = {
    option.name: (
        _field_type(option.kind, option.default),
        Field(option.default, description=option.help),
    )
    for option in planner_options()
}
_PlannerFields: type[BaseSettings] = create_model("_PlannerFields", __base__=BaseSettings, **_PLANNER_FIELDS)


class ServiceSettings(_PlannerFields):
    """Everything that can be set about a running service; each is a flag of ``eplb serve`` too."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    listen: Address = Field(
        "127.0.0.1:50551", description="host:port for agents and operators; port 0 takes a free one"
    )
    metrics: Address = Field(
        "127.0.0.1:9464",
        description="host:port of Prometheus' /metrics, and of the web page where `page` is not set; port 0 takes a "
        "free one",
    )
    page: Address | None = Field(
        None,
        description="host:port of the web page, with TLS where tls_cert is set; unset: with the metrics, in plain text",
    )
    store: str = Field(
        "eplb-state.sqlite3",
        min_length=1,
        description="SQLite file with terms, placements and plans, resumed from at a restart; ':memory:' keeps none",
    )
    window_steps: int = Field(
        512,
        ge=1,
        le=65536,
        description="steps that a decision looks at, at most; beyond decision_interval only those with the heat of now",
    )
    decision_interval: int = Field(
        256,
        ge=1,
        description="steps before the first decision and, where decide_on is interval, between decisions",
    )
    decide_on: Literal["change", "interval"] = Field(
        "interval",
        description="when decisions are made; change: soon after what is realised departs from what was promised, and "
        "seldom where nothing can be won; interval: every decision_interval steps",
    )
    prior: str | None = Field(
        None,
        description="heat by which deployments get their first plan, before they have any of their own, as "
        "DEPLOYMENT=SOURCE with commas between: another deployment of this service, such as the prefill instance of "
        "the same model, or a trace",
    )
    record: Path | None = Field(
        None,
        description="folder to write each deployment's heat into, as native traces; unset: none is recorded",
    )
    report_steps: ReportSteps = Field(
        "auto",
        description="steps that an agent gathers into one report, 1 to 1024; auto: 16, and up to 64 where many ranks "
        "step fast",
    )
    heartbeat_seconds: float = Field(2.0, ge=0.05, le=60, description="seconds between an agent's heartbeats")
    plan_timeout_seconds: float = Field(
        60.0, gt=0, description="seconds without a word from any rank after which a plan is given up"
    )
    max_deployments: int = Field(64, ge=1, description="most deployments known at a time")
    forget_after_seconds: float = Field(
        7 * 86400.0,
        ge=0,
        description="seconds without any rank after which a deployment is forgotten, unless it is paused; 0: never",
    )
    max_message_bytes: int = Field(
        16 << 20,
        ge=1 << 16,
        le=MAX_MESSAGE_BYTES,
        description="largest request of an agent; what is larger than 128 KiB comes in parts",
    )
    max_in_flight_bytes: int = Field(
        256 << 20,
        ge=1 << 16,
        description="most memory that requests in parts may take while they are under way; one host may have a fourth",
    )
    max_connections: int = Field(8192, ge=1, description="most connections open at a time")
    max_streams: int = Field(8192, ge=1, description="most calls and streams open at a time")
    max_streams_per_peer: int = Field(
        1024, ge=1, description="most calls and streams that one host may have open at a time"
    )
    max_heat_bytes: int = Field(
        2 << 30,
        ge=1 << 20,
        description="most memory that the heat of all deployments may take, by their shapes",
    )
    solve_timeout_seconds: float = Field(
        120.0, gt=0, description="seconds after which a decision is given up, for others to be made"
    )
    auth_token: SecretStr | None = Field(
        None,
        description="shared token that every call must bring as 'authorization: Bearer TOKEN'; unset: none asked",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain; set with tls_key to serve TLS")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authority whose client certificates are asked for (mutual TLS)"
    )
    credentials: Path | None = Field(
        None,
        description="YAML file of credentials by role, deployment and rank; read again whenever it changes",
    )
    insecure: bool = Field(
        False, description="listen beyond loopback without TLS or credentials, for whoever reaches the port"
    )
    lease: LeaseName | None = Field(
        None,
        description="lead only while this lease is held, and wait for it: file:PATH or kubernetes:NAME",
    )
    lease_seconds: float = Field(
        15.0, ge=1, le=300, description="seconds after which an unrenewed Kubernetes lease is free"
    )
    health: Address | None = Field(
        None,
        description="host:port that answers gRPC health checks and nothing else, without TLS or credentials",
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="how logs are written to stderr; auto: console on a terminal, JSON otherwise"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ServiceSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if not (self.insecure or is_loopback(self.listen) or (self._encrypts and self._asks_who_calls)):
            raise ValueError(
                f"listen {self.listen} is reached from other hosts: set tls_cert and tls_key, and credentials or "
                "auth_token; or set insecure for a network in which everybody may do everything"
            )
        if self.max_in_flight_bytes < self.max_message_bytes:
            raise ValueError(
                f"max_in_flight_bytes {self.max_in_flight_bytes} has no room for a request of max_message_bytes "
                f"{self.max_message_bytes}"
            )
        if self.auth_token is not None and not self.auth_token.get_secret_value():
            raise ValueError("auth_token is empty; leave it unset to ask for none")
        try:
            self.planner()
        except PlannerSettingsError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def _encrypts(self) -> bool:
        return self.tls_cert is not None

    @property
    def _asks_who_calls(self) -> bool:
        return self.auth_token is not None or self.credentials is not None

    def planner(self) -> PlannerSettings:
        """What the planner needs of these."""
        return planner_settings({option.name: getattr(self, option.name) for option in planner_options()})
