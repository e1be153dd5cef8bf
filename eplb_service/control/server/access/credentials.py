"""Who may call: credentials from a file that is read again whenever it changes, so that they rotate without a restart.

The file is YAML, a list of credentials::

    - name: decode-agents          # as audit lines name the caller
      role: agent                  # agent, operator or reader
      deployments: [decode]        # or ['*']
      ranks: 0-15                  # agents only; absent: all
      token_sha256: 9f86d0...      # or `token:` itself, or `certificate:` and a client certificate's name

Two credentials may serve the same purpose at a time: add the new one, hand it out, remove the old one.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import structlog
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from eplb_service.control.server.settings import SettingsError
from eplb_service.wire.fields import MOST_RANKS, check_deployment, check_name

_log = structlog.get_logger(__name__)

_ALL = "*"
_SHORTEST_TOKEN = 16


class Role(enum.Enum):
    """What a caller is."""

    AGENT = "agent"
    """Speaks for ranks."""
    OPERATOR = "operator"
    """Reads and gives orders."""
    READER = "reader"
    """Reads."""


def _checked_ranks(text: str) -> str:
    _ranks(text)
    return text


def _checked_deployments(names: list[str]) -> list[str]:
    for name in names:
        if name != _ALL:
            check_deployment(name, "deployments")
    return names


class _Entry(BaseModel):
    """One credential as the file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(lambda name: check_name(name, "name"))] = Field(min_length=1)
    role: Role
    deployments: Annotated[list[str], AfterValidator(_checked_deployments)] = Field(min_length=1)
    ranks: Annotated[str, AfterValidator(_checked_ranks)] | None = None
    token: str | None = Field(None, min_length=_SHORTEST_TOKEN, repr=False)
    token_sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    certificate: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _proves_itself_once(self) -> _Entry:
        if sum(proof is not None for proof in (self.token, self.token_sha256, self.certificate)) != 1:
            raise ValueError("name exactly one of token, token_sha256 and certificate")
        if self.ranks is not None and self.role is not Role.AGENT:
            raise ValueError("only agents have ranks")
        return self


@dataclass(frozen=True)
class Credential:
    """One way to prove who calls.

    Parameters
    ----------
    name
        As logs name the caller.
    roles
        What the caller may be.
    deployments
        Those that it may name; ``None`` for all.
    ranks
        Those that it may speak for; ``None`` for all.
    token_digest
        SHA-256 of its token; empty where it has none.
    certificate
        A name in its client certificate; empty where it has none.
    """

    name: str
    roles: frozenset[Role]
    deployments: frozenset[str] | None = None
    ranks: frozenset[int] | None = None
    token_digest: bytes = field(default=b"", repr=False)
    certificate: str = ""

    def reaches(self, deployment: str) -> bool:
        """Whether it may name ``deployment``."""
        return self.deployments is None or deployment in self.deployments

    def speaks_for(self, rank: int) -> bool:
        """Whether it may be ``rank``."""
        return self.ranks is None or rank in self.ranks


ANYONE = Credential("anonymous", frozenset(Role))
"""The caller where no credentials are asked for."""


def shared_token(token: str) -> Credential:
    """One token for every role and deployment."""
    return Credential("auth_token", frozenset(Role), token_digest=_digest(token))


class Credentials:
    """All credentials of a service.

    Parameters
    ----------
    fixed
        Credentials that hold as long as the service runs.
    path
        File of further ones.

    Raises
    ------
    SettingsError
        The file cannot be read; the message names the entry and what is wrong with it.
    """

    def __init__(self, fixed: Sequence[Credential] = (), path: Path | None = None) -> None:
        self._fixed = tuple(fixed)
        self._path = path
        self._version: object = None
        self._listed: tuple[Credential, ...] = ()
        if path is not None:
            self._version = _version_of(path)
            self._listed = read_credentials(path)

    @property
    def asked(self) -> bool:
        """Whether callers must prove who they are."""
        return bool(self._fixed) or self._path is not None

    def refresh(self) -> bool:
        """Read the file again if it has changed; whether other credentials hold now.

        A file that cannot be read changes nothing: those that were valid remain so, and an error is logged.
        """
        if self._path is None:
            return False
        try:
            version = _version_of(self._path)
            if version == self._version:
                return False
            self._version = version
            listed = read_credentials(self._path)
        except SettingsError as error:
            _log.error("credentials_unreadable", reason=str(error))
            return False
        changed, self._listed = listed != self._listed, listed
        _log.info("credentials_read", credentials=len(listed))
        return changed

    def holds(self, credential: Credential) -> bool:
        """Whether ``credential`` is one of these still."""
        return credential in (*self._fixed, *self._listed) or (credential is ANYONE and not self.asked)

    def of(self, token: str, certificate_names: Iterable[str]) -> Credential | None:
        """The credential that a caller has proven, by token or by the names in its certificate; ``None``: none."""
        if not self.asked:
            return ANYONE
        digest, names = _digest(token), set(certificate_names)
        found = None
        for credential in (*self._fixed, *self._listed):
            # All are compared, so that the time taken does not say which came close.
            matches = bool(token) and hmac.compare_digest(
                digest, credential.token_digest or b"-" * len(digest)
            )
            if matches or (credential.certificate and credential.certificate in names):
                found = found or credential
        return found


def read_credentials(path: Path) -> tuple[Credential, ...]:
    """The credentials in a file; raises ``SettingsError``."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the credentials: {error}") from error
    except yaml.YAMLError:
        # The parser's own message would show the line, and with it a token.
        raise SettingsError(f"{path} is not YAML") from None
    if not isinstance(entries, list) or not entries:
        raise SettingsError(f"{path} must hold a list of credentials")
    found = tuple(_read_entry(path, number, entry) for number, entry in enumerate(entries, start=1))
    names = [credential.name for credential in found]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{path}: two credentials are called {name!r}")
    return found


def _read_entry(path: Path, number: int, entry: Any) -> Credential:
    try:
        checked = _Entry.model_validate(entry)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise SettingsError(
            f"{path}: credential {number}: {where + ': ' if where else ''}{message}"
        ) from None
    token_digest = _digest(checked.token) if checked.token else bytes.fromhex(checked.token_sha256 or "")
    return Credential(
        checked.name,
        frozenset((checked.role,)),
        None if _ALL in checked.deployments else frozenset(checked.deployments),
        None if checked.ranks is None else _ranks(checked.ranks),
        token_digest,
        checked.certificate or "",
    )


def _ranks(text: str) -> frozenset[int]:
    """``0-15,32`` as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"ranks are such as 0-15 or 0,3, not {text!r}")
        low, high = int(first), int(last or first)
        if not low <= high < MOST_RANKS:
            raise ValueError(f"ranks are 0 to {MOST_RANKS - 1}, in ascending order, not {part.strip()!r}")
        found.update(range(low, high + 1))
    return frozenset(found)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _version_of(path: Path) -> object:
    try:
        found = path.stat()
    except OSError as error:
        raise SettingsError(f"cannot read the credentials: {error}") from error
    return found.st_mtime_ns, found.st_size, found.st_ino
