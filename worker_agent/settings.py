"""Agent settings. Arguments override environment variables (``EPLB_AGENT_*``), which override the defaults."""

from __future__ import annotations

import difflib
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from eplb_core.wire.channel import DEFAULT_ADDRESS, Security
from worker_agent.modes import Mode

TransferBackend: TypeAlias = Literal["auto", "gloo", "nccl", "hccl"]
"""Library that transfers experts. ``auto`` selects one according to the experts' device."""


class AgentSettings(BaseSettings):
    """Settings of one agent: its connection to the service, its votes, and its transfers.

    ``deployment`` and most of the settings from ``vote_interval`` on must be the same on all ranks of a group. The
    ranks compare these settings (``shared``) at the rendezvous.

    Examples
    --------
    >>> settings = AgentSettings(service="eplb.example:50551", bytes_per_step=1 << 20)
    >>> settings.vote_interval, settings.shared()["bytes_per_step"]
    (4, 1048576)
    """

    model_config = SettingsConfigDict(env_prefix="EPLB_AGENT_", extra="forbid", frozen=True)

    mode: Mode | None = Field(
        None,
        description="Role of the agent inside the engine: observe (record heat, change nothing), policy (decide "
        "inside the engine's own EPLB, which moves the weights) or full (replace the engine's EPLB); full if only the "
        "service is set.",
    )
    service: str = Field(DEFAULT_ADDRESS, description="Address (host:port) of the service.")
    deployment: str = Field("default", description="Name of this served model instance.")
    node: str = Field(default_factory=socket.gethostname, description="Name of this rank's host.")
    data_host: str = Field(
        default_factory=socket.getfqdn,
        description="Host name or address at which other ranks reach this one.",
    )
    auth_token: SecretStr | None = Field(None, description="Token that the service requires.")
    auth_token_file: Path | None = Field(
        None,
        description="File that holds the token, read at every connection, so that the token can be rotated without a "
        "restart.",
    )
    tls_ca: Path | None = Field(None, description="PEM file of the CA that signed the service's certificate.")
    tls_cert: Path | None = Field(
        None, description="PEM file of this agent's certificate, if the service requires one."
    )
    tls_key: Path | None = Field(None, description="PEM file of the private key for tls_cert.")
    plaintext_token: bool = Field(
        False, description="Send the token in plain text to another host; only for a trusted network."
    )

    vote_interval: int = Field(
        4,
        ge=1,
        le=1024,
        description="Steps between votes while any rank holds a plan, and for 64 steps afterwards; at other times, the "
        "interval is four times as long.",
    )
    vote_timeout_seconds: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Maximum wait for a ballot, after which the ranks keep serving and open a new vote link.",
    )
    commit_timeout_seconds: float = Field(
        1.0,
        gt=0,
        le=3600,
        description="Maximum wait for all ranks to reach the forward pass at which a layer is committed, after which "
        "the plan is dropped.",
    )
    peer_timeout_seconds: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Maximum wait for a rank that may have committed a layer; use at least the timeout of the model's "
        "own collectives.",
    )
    transfer_timeout_seconds: float = Field(
        60.0, gt=0, le=3600, description="Time limit for the transfer of one layer."
    )
    bytes_per_step: int | None = Field(
        None,
        ge=1,
        description="Bytes that a rank may send, and may receive, per step; if unset, see link_share.",
    )
    link_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Maximum share of time for which a transfer keeps a rank's link busy, if bytes_per_step is unset.",
    )
    staging_mib: int = Field(
        512,
        ge=0,
        le=1 << 20,
        description="MiB of staging for incoming experts, capped at what four layers need and reserved at start-up on "
        "a GPU or NPU; layers that fit together switch with one vote, and a layer that does not fit is switched alone "
        "and allocates more memory during its transfer.",
    )
    transfer_backend: TransferBackend = Field(
        "auto",
        description="Library that transfers experts: auto (nccl between GPUs, hccl between NPUs, otherwise gloo), gloo "
        "(through the host), nccl or hccl.",
    )
    verify_transfers: bool | None = Field(
        None,
        description="Send a checksum with each expert, and compare the installed weights with it; on if unset, "
        "because no device has yet been shown to transfer experts intact without it.",
    )
    quantised_experts: bool = Field(
        False,
        description="Balance vLLM-Ascend's quantised experts, which use the NPU's own formats; needs verify_transfers.",
    )
    allow_unverified_engine: bool = Field(
        False,
        description="Run even if the engine's functions match the tested signatures but not the tested bodies, or if "
        "the engine release is untested.",
    )
    decision_timeout_seconds: float = Field(
        2.0,
        gt=0,
        le=60,
        description="Maximum wait for the service's decision in policy mode, after which the ranks decide on their "
        "own.",
    )
    window_parts: int = Field(
        64,
        ge=1,
        le=1024,
        description="Number of parts into which policy mode divides the engine's window of heat.",
    )
    step_split: Annotated[int, Field(ge=1)] | Literal["auto", "on", "off"] = Field(
        "auto",
        description="Choose replicas according to each step's own counts: on, off, auto (only if it pays according to "
        "the fitted costs), or the minimum number of tokens in a step for the step to be split.",
    )
    initial_placement: Path | None = Field(
        None,
        description="Placement file (from eplb solve --out) from which policy mode starts in vLLM.",
    )
    log_interval_steps: int = Field(
        1000, ge=1, description="Number of forward passes between log lines that report the engine's balance."
    )
    trace: Path | None = Field(
        None,
        description="Trace file that observe mode writes if no service is set, as .npz; by default, only log lines are "
        "written.",
    )
    history: Path | None = Field(
        None, description="Directory in which each rank records votes, switches and heat, as JSON lines."
    )

    @field_validator("service")
    @classmethod
    def _is_an_address(cls, service: str) -> str:
        if service.lower().startswith(("http://", "https://")):
            raise ValueError(f"expected host:port, got the URL {service}; set tls_ca to use TLS")
        return service

    @field_validator("data_host")
    @classmethod
    def _is_one_host(cls, data_host: str) -> str:
        try:
            address = ipaddress.ip_address(data_host)
        except ValueError:
            address = None
        if not data_host or (address is None and ":" in data_host):
            raise ValueError(f"expected a host name or an IP address without a port, got {data_host!r}")
        if address is not None and address.is_unspecified:
            raise ValueError(
                f"{data_host} is a wildcard address; use the address that other ranks connect to"
            )
        return data_host

    @model_validator(mode="after")
    def _keeps_its_token(self) -> AgentSettings:
        if self.auth_token is not None and self.auth_token_file is not None:
            raise ValueError("set auth_token or auth_token_file, not both")
        security = self.security
        if self.auth_token is not None or self.auth_token_file is not None:
            security.check_token(self.service)
        return self

    @model_validator(mode="after")
    def _verifies_quantised_experts(self) -> AgentSettings:
        if self.quantised_experts and self.verify_transfers is False:
            raise ValueError(
                "quantised_experts needs verify_transfers; leave verify_transfers unset or set it to true"
            )
        return self

    @property
    def security(self) -> Security:
        """Security settings for the channel to the service."""
        return Security(self.tls_ca, self.tls_cert, self.tls_key, self.plaintext_token)

    def token(self) -> str | None:
        """Return the current token, or ``None`` if no token is set.

        Raises
        ------
        OSError
            If the token file cannot be read.
        """
        if self.auth_token_file is not None:
            return self.auth_token_file.read_text(encoding="utf-8").strip()
        return None if self.auth_token is None else self.auth_token.get_secret_value()

    def shared(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks, keyed by name."""
        names = (
            "deployment",
            "vote_interval",
            "vote_timeout_seconds",
            "commit_timeout_seconds",
            "peer_timeout_seconds",
            "transfer_timeout_seconds",
            "bytes_per_step",
            "link_share",
            "staging_mib",
            "verify_transfers",
        )
        return {name: getattr(self, name) for name in names}


def bare_name_warning(data_host: str) -> str | None:
    """Return a warning if ``data_host`` is a name without a domain, or ``None`` for an IP address or a full name.

    Examples
    --------
    >>> bare_name_warning("node-3.example"), bare_name_warning("fd00::3")
    (None, None)
    >>> bare_name_warning("node-3").partition(":")[0]
    "EPLB_AGENT_DATA_HOST is 'node-3', a name without a domain"
    """
    if "." in data_host or ":" in data_host:
        return None
    return (
        f"EPLB_AGENT_DATA_HOST is {data_host!r}, a name without a domain: this host may resolve it to an address that "
        "other nodes cannot reach; if ranks run on several nodes, set it to the node's IP address or full name"
    )


def misspelt_settings(variables: Iterable[str]) -> list[str]:
    """Return a complaint about each environment variable that looks like a setting but is not one.

    Parameters
    ----------
    variables
        Names of environment variables.

    Returns
    -------
    list of str
        Complaints sorted by variable name, each with a suggestion of the most similar setting.

    Examples
    --------
    Settings are not case-sensitive:

    >>> misspelt_settings(["PATH", "EPLB_AGENT_SERVICE", "eplb_agent_deploymnt"])
    ['eplb_agent_deploymnt is not a setting and has no effect; did you mean EPLB_AGENT_DEPLOYMENT?']
    """
    prefix = AgentSettings.model_config["env_prefix"]
    settings = [f"{prefix}{name}".upper() for name in AgentSettings.model_fields]
    complaints = []
    for name in sorted(variables):
        # Match the prefix without its last underscore, so that a name without that underscore is also reported.
        if name.upper().startswith("EPLB_AGENT") and name.upper() not in settings:
            nearest = difflib.get_close_matches(name.upper(), settings, 1, 0.0)[0]
            complaints.append(f"{name} is not a setting and has no effect; did you mean {nearest}?")
    return complaints
