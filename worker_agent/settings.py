"""Settings of an agent: arguments > environment ``EPLB_AGENT_*`` > defaults."""

from __future__ import annotations

import difflib
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from eplb_core.wire.channel import Security

TransferBackend: TypeAlias = Literal["auto", "gloo", "nccl", "hccl"]
"""Library to carry experts with; ``auto`` for that of their device."""


class AgentSettings(BaseSettings):
    """Settings of one agent: how it reaches the service, and how its ranks vote and transfer.

    All ranks of a group must have the same values from ``vote_interval`` on; they compare them when they meet.
    """

    model_config = SettingsConfigDict(env_prefix="EPLB_AGENT_", extra="forbid", frozen=True)

    service: str = Field("127.0.0.1:50551", description="host:port of the service")
    deployment: str = Field("default", description="name of this served model instance")
    node: str = Field(default_factory=socket.gethostname, description="host of this rank")
    data_host: str = Field(
        default_factory=socket.getfqdn, description="address at which other ranks reach this one"
    )
    auth_token: SecretStr | None = Field(None, description="token that the service asks for")
    auth_token_file: Path | None = Field(
        None,
        description="file that holds the token, read again at every connection: it rotates without a restart",
    )
    tls_ca: Path | None = Field(
        None, description="PEM file of the authority that signed the service's certificate"
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of this agent's certificate, where the service asks for one"
    )
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert")
    plaintext_token: bool = Field(
        False, description="send the token in plain text to another host, where the network is trusted"
    )

    vote_interval: int = Field(
        4,
        ge=1,
        le=1024,
        description="steps between votes while any rank holds a plan and for 64 steps after it; four times as many "
        "at other times",
    )
    vote_timeout_seconds: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="longest wait for a ballot; past it the ranks serve on, and form their votes again",
    )
    commit_timeout_seconds: float = Field(
        1.0,
        gt=0,
        le=3600,
        description="longest wait for all ranks to be at the forward pass at which a layer is to be committed; past it "
        "the plan is dropped",
    )
    peer_timeout_seconds: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="longest wait for a rank that may have committed a layer: no less than the model waits for it",
    )
    transfer_timeout_seconds: float = Field(60.0, gt=0, le=3600, description="bound on one layer's transfer")
    bytes_per_step: int | None = Field(
        None, ge=1, description="bytes that a rank may send, and receive, per step; if unset, see link_share"
    )
    link_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="largest share of the time that a transfer keeps a rank's link busy, if bytes_per_step is unset",
    )
    staging_mib: int = Field(
        512,
        ge=0,
        le=1 << 20,
        description="MiB of staging for incoming experts, at most what four layers can need, reserved at start-up on "
        "a GPU or NPU; layers that fit together switch with one vote, and a layer that does not fit switches alone "
        "and allocates more memory during its transfer",
    )
    transfer_backend: TransferBackend = Field(
        "auto",
        description="what carries experts: auto (nccl between GPUs, hccl between NPUs, else gloo), gloo (through the "
        "host), nccl or hccl",
    )
    verify_transfers: bool | None = Field(
        None,
        description="send a checksum with each expert, and compare the installed weights with it; on if unset, "
        "because no device has yet been shown to transfer experts intact without it",
    )
    quantised_experts: bool = Field(
        False,
        description="balance vLLM-Ascend's quantised experts, which use the NPU's own formats; needs verify_transfers",
    )
    allow_unverified_engine: bool = Field(
        False,
        description="serve beside an engine whose functions take the known arguments but have other bodies than the "
        "tested ones, also one of an untried release",
    )
    history: Path | None = Field(
        None, description="folder in which each rank records votes, switches and heat, as JSON lines"
    )

    @field_validator("service")
    @classmethod
    def _is_an_address(cls, service: str) -> str:
        if service.lower().startswith(("http://", "https://")):
            raise ValueError(f"{service} is a URL: write host:port; TLS is switched on by tls_ca")
        return service

    @field_validator("data_host")
    @classmethod
    def _is_one_host(cls, data_host: str) -> str:
        try:
            address = ipaddress.ip_address(data_host)
        except ValueError:
            address = None
        if not data_host or (address is None and ":" in data_host):
            raise ValueError(f"{data_host!r} is not a host; use a host name or an IP address without a port")
        if address is not None and address.is_unspecified:
            raise ValueError(
                f"{data_host} means every address of this host; use the address that other ranks connect to"
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
                "quantised_experts needs verify_transfers; leave the latter out or set it to true"
            )
        return self

    @property
    def security(self) -> Security:
        """Security of the channel to the service."""
        return Security(self.tls_ca, self.tls_cert, self.tls_key, self.plaintext_token)

    def token(self) -> str | None:
        """Return the token as it is now; raises ``OSError`` where its file cannot be read."""
        if self.auth_token_file is not None:
            return self.auth_token_file.read_text(encoding="utf-8").strip()
        return None if self.auth_token is None else self.auth_token.get_secret_value()

    def shared(self) -> dict[str, object]:
        """Settings that must be the same on all ranks."""
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


def misspelt(variables: Iterable[str]) -> list[str]:
    """Name those of an environment's ``variables`` that begin like a setting's and are none, with the nearest one."""
    prefix = AgentSettings.model_config["env_prefix"]
    known = [f"{prefix}{name}".upper() for name in AgentSettings.model_fields]
    found = []
    for name in sorted(variables):
        # A forgotten underscore, or a letter of the prefix, is a slip of the same kind.
        if name.upper().startswith("EPLB_AGENT") and name.upper() not in known:
            near = difflib.get_close_matches(name.upper(), known, 1, 0.0)
            found.append(f"{name} is no setting and has no effect; did you mean {near[0]}?")
    return found
