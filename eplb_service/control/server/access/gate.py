"""Credentials and the gate of every call: who calls, whether that caller may, and whether there is room.

Credentials are in a YAML file, a list that is read again whenever it changes, so that they rotate without a restart::

    - name: decode-agents          # as audit lines name the caller
      role: agent                  # agent, operator or reader
      deployments: [decode]        # or ['*']
      ranks: 0-15                  # agents only; absent: all
      token_sha256: 9f86d0...      # or `token:` itself, or `certificate:` and a client certificate's name

Nothing of a call's body is read until the gate is passed. gRPC reads the one message of a unary call before it runs the
handler, so unary calls are served as streams here: a refusal costs no more than the call's headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import grpc
import structlog
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from eplb_core.wire.fields import MAX_RANKS, WireError, check_deployment, check_name, printable
from eplb_service.control.core.errors import ExhaustedError, RefusedError
from eplb_service.control.server.access.quotas import Quotas, host_of
from eplb_service.control.server.listening import StatusError, code_of
from eplb_service.control.server.settings import SettingsError
from eplb_service.telemetry.logs import BoundedLog
from eplb_service.telemetry.metrics import Metrics

_ALL = "*"
_MIN_TOKEN = 16
_MESSAGE_SECONDS = 10.0
_OPERATOR = "/eplb.v1.OperatorService/"
_READ = frozenset({"ListDeployments", "GetStatus", "GetPlacement", "GetHistory", "GetBalance", "WatchHeat"})
_OPEN = "/grpc.health.v1.Health/"
"""Probes of orchestrators bring no credentials, and health gives nothing away."""

_log = structlog.get_logger(__name__)


_Role: TypeAlias = Literal["agent", "operator", "reader"]
"""Part that a caller plays: speaks for ranks, reads and gives orders, or only reads."""
_EVERY_ROLE: frozenset[_Role] = frozenset(("agent", "operator", "reader"))


def _ranks(text: Any) -> frozenset[int]:
    """Return ``0-15,32`` as numbers."""
    found: set[int] = set()
    for part in str(text).split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"ranks are such as 0-15 or 0,3, not {text!r}")
        low, high = int(first), int(last or first)
        if not low <= high < MAX_RANKS:
            raise ValueError(f"ranks are 0 to {MAX_RANKS - 1}, in ascending order, not {part.strip()!r}")
        found.update(range(low, high + 1))
    return frozenset(found)


def _checked_deployments(names: frozenset[str]) -> frozenset[str]:
    for name in names - {_ALL}:
        check_deployment(name, "deployments")
    return names


class Credential(BaseModel):
    """One way to prove who calls, as the file has it; ``roles`` are all where one token serves every purpose."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(lambda name: check_name(name, "name"))] = Field(min_length=1)
    roles: Annotated[
        frozenset[_Role], BeforeValidator(lambda role: role if isinstance(role, frozenset) else [role])
    ] = Field(alias="role", min_length=1)
    deployments: Annotated[frozenset[str], AfterValidator(_checked_deployments)] = Field(min_length=1)
    ranks: Annotated[frozenset[int], BeforeValidator(_ranks)] | None = None
    token: str | None = Field(None, min_length=_MIN_TOKEN, repr=False)
    token_sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$", repr=False)
    certificate: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _proves_itself_once(self) -> Credential:
        if sum(proof is not None for proof in (self.token, self.token_sha256, self.certificate)) != 1:
            raise ValueError("name exactly one of token, token_sha256 and certificate")
        if self.ranks is not None and "agent" not in self.roles:
            raise ValueError("only agents have ranks")
        return self

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of its token; no token has that of a credential without one."""
        return _digest(self.token) if self.token else bytes.fromhex(self.token_sha256 or "00" * 32)

    def reaches(self, deployment: str) -> bool:
        """Return whether it may name ``deployment``."""
        return _ALL in self.deployments or deployment in self.deployments

    def check_reach(self, request: Any, rank: int | None = None) -> None:
        """Raise ``StatusError`` where ``request`` is of a deployment, or ``rank``, that it may not name."""
        name, reason = getattr(request, "deployment", None), ""
        if isinstance(name, str) and not self.reaches(name):
            reason = f"{self.name!r} has no say in deployment {printable(name)!r}"
        elif rank is not None and self.ranks is not None and rank not in self.ranks:
            reason = f"{self.name!r} may not be rank {rank}"
        if reason:
            raise StatusError(grpc.StatusCode.PERMISSION_DENIED, reason)


_ANYONE = Credential.model_construct(
    name="anonymous", roles=_EVERY_ROLE, deployments=frozenset({_ALL}), ranks=None
)


class Credentials:
    """All credentials of a service: ``token``, for every role, as long as it runs, and those of a file.

    Raises ``SettingsError`` where the file cannot be read; the message names the entry and what is wrong with it.
    """

    def __init__(self, token: str = "", path: Path | None = None) -> None:
        roles, digest = _EVERY_ROLE, _digest(token).hex()
        shared = Credential(name="auth_token", role=roles, deployments=frozenset({_ALL}), token_sha256=digest)
        self._shared = (shared,) if token else ()
        self._path = path
        self._content = b"" if path is None else _content(path)
        self._all = self._shared if path is None else (*self._shared, *_listed(path, self._content))
        self.are_asked_for = bool(self._all)

    def refresh(self) -> bool:
        """Read the file again if it has changed; returns whether other credentials hold now.

        A file that cannot be read changes nothing: those that were valid remain so, and an error is logged.
        """
        if self._path is None:
            return False
        before = self._all
        try:
            content = _content(self._path)
            if content == self._content:
                return False
            self._content = content
            self._all = (*self._shared, *_listed(self._path, content))
        except SettingsError as error:
            _log.error("credentials_unreadable", reason=str(error))
            return False
        _log.info("credentials_read", credentials=len(self._all))
        return self._all != before

    def hold(self, credential: Credential) -> bool:
        """Return whether ``credential`` is one of these still."""
        return credential in self._all or not self.are_asked_for

    def proven_by(self, token: str, certificate_names: Iterable[str]) -> Credential | None:
        """Return the credential that a token or the names in a certificate prove; ``None`` for none."""
        if not self.are_asked_for:
            return _ANYONE
        digest, names = _digest(token), set(certificate_names)
        found = None
        for credential in self._all:
            # All are compared, so that the time taken does not say which came close.
            matches = bool(token) and hmac.compare_digest(digest, credential.digest)
            if matches or (credential.certificate and credential.certificate in names):
                found = found or credential
        return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read the credentials: {error}") from error


def _listed(path: Path, content: bytes) -> tuple[Credential, ...]:
    """Return the credentials in a file; raises ``SettingsError``."""
    try:
        entries = yaml.safe_load(content)
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply; it must hold a list of credentials") from None
    except Exception:
        # Values of some kinds, such as impossible dates, end in errors of any type. Their messages would show the line,
        # and with it a token.
        raise SettingsError(f"{path} is not YAML") from None
    if not isinstance(entries, list) or not entries:
        raise SettingsError(f"{path} must hold a list of credentials")
    found: dict[str, Credential] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            credential = Credential.model_validate(entry)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            where = "".join(f"{part}: " for part in problem["loc"][:1])
            message = problem["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{path}: credential {number}: {where}{message}") from None
        if credential.name in found:
            raise SettingsError(f"{path}: two credentials are called {credential.name!r}")
        found[credential.name] = credential
    return tuple(found.values())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Caller(NamedTuple):
    """Credential and host of the caller of the call that is being answered."""

    credential: Credential
    host: str


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Caller of the call that is being answered; each is answered in a task, and so in a context, of its own."""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Turns calls away, or hands them on; refusals and orders are counted by ``metrics`` and written to ``log``."""

    def __init__(self, credentials: Credentials, quotas: Quotas, metrics: Metrics, log: BoundedLog) -> None:
        self.credentials = credentials
        self._quotas = quotas
        self._metrics = metrics
        self._log = log
        self._open: dict[asyncio.Task[Any], Credential] = {}

    def refresh(self) -> None:
        """Read the credentials again if they have changed; calls under one that no longer holds end."""
        if not self.credentials.refresh():
            return
        for task, credential in list(self._open.items()):
            if not self.credentials.hold(credential):
                _log.warning("credential_withdrawn", caller=credential.name)
                task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler behind the gate."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        token = _token(dict(handler_call_details.invocation_metadata or ()))

        async def guarded(requests: Any, context: Any) -> Any:
            host, task = host_of(context.peer()), asyncio.current_task()
            assert task is not None
            try:
                caller = Caller(self.admitted(method, token, _certificate_names(context)), host)
                CALLER.set(caller)
                self._open[task] = caller.credential
                if method.startswith(_OPEN):
                    return await self._quotas.probe(
                        host, self._served(handler, method, caller, requests, context)
                    )
                with self._quotas.call(host, proven=caller.credential is not _ANYONE):
                    return await self._served(handler, method, caller, requests, context)
            except (StatusError, RefusedError, WireError) as error:
                code, reason = code_of(error), str(error)
            finally:
                self._open.pop(task, None)
            # Outside the handler: the error's traceback holds the message that was refused, and is let go of first.
            self.note_refusal(method, host, code, reason)
            await context.abort(code, reason)
            return None

        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        made: grpc.RpcMethodHandler[Any, Any] = make(
            guarded, handler.request_deserializer, handler.response_serializer
        )
        return made

    def admitted(self, method: str, token: str, certificate_names: Iterable[str]) -> Credential:
        """Return the caller's credential; raises ``StatusError`` where there is none, or it has not the role."""
        if method.startswith(_OPEN):
            return _ANYONE
        credential = self.credentials.proven_by(token, certificate_names)
        if credential is None:
            raise StatusError(
                grpc.StatusCode.UNAUTHENTICATED,
                "this service asks for 'authorization: Bearer TOKEN' or a client certificate; "
                f"{'the token is wrong' if token else 'there was none'}",
            )
        roles = _roles_for(method)
        if not roles & credential.roles:
            asked = " or ".join(sorted(roles))
            raise StatusError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{credential.name!r} may not call {method.rpartition('/')[2]}, which is for {asked}",
            )
        return credential

    def note_refusal(self, method: str, host: str, code: grpc.StatusCode, reason: str) -> None:
        """Count a call that was turned away, and log it at a bounded rate."""
        self._metrics.count("eplb_refusals", code.name.lower())
        self._log.warning("call_refused", method=method, peer=host, code=code.name, reason=reason)

    async def _served(self, handler: Any, method: str, caller: Caller, requests: Any, context: Any) -> Any:
        if handler.request_streaming:
            serve = handler.stream_stream or handler.stream_unary
            return await _answered(serve(requests, context), context)
        request = await _only_message(context)
        caller.credential.check_reach(request)
        serve = handler.unary_stream or handler.unary_unary
        if method.startswith(_OPERATOR) and method.rpartition("/")[2] not in _READ:
            return await self._audited(serve(request, context), method, caller, request)
        return await _answered(serve(request, context), context)

    async def _audited(self, answer: Awaitable[Any], method: str, caller: Caller, request: Any) -> Any:
        """Log an operator's order with its caller, whether or not it is carried out."""
        name, result = method.rpartition("/")[2], "failed"
        try:
            answered = await answer
            result = "done"
            return answered
        finally:
            self._metrics.count("eplb_operator_calls", name, result)
            _log.info(
                "operator_call",
                call=name,
                deployment=printable(request.deployment),
                caller=caller.credential.name,
                peer=caller.host,
                result=result,
            )


def _roles_for(method: str) -> set[_Role]:
    if method.startswith("/eplb.v1.AgentService/"):
        return {"agent"}
    orders = method.startswith(_OPERATOR) and method.rpartition("/")[2] not in _READ
    return {"operator"} if orders else {"reader", "operator"}


def _token(metadata: Mapping[str, str | bytes]) -> str:
    given = metadata.get("authorization", "")
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    kind, _, token = text.partition(" ")
    return token if kind == "Bearer" else ""


def _certificate_names(context: Any) -> Iterable[str]:
    """Return the names in a client certificate that the listener has verified; none without mutual TLS."""
    found: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        yield from (value.decode("utf-8", "replace") for value in found.get(key, ()))


async def _only_message(context: Any) -> Any:
    try:
        request = await asyncio.wait_for(context.read(), _MESSAGE_SECONDS)
    except asyncio.TimeoutError:
        raise ExhaustedError(f"the request did not arrive within {_MESSAGE_SECONDS:g} seconds") from None
    if request == grpc.aio.EOF:
        raise WireError("the call has no request")
    return request


async def _answered(serving: Any, context: Any) -> Any:
    if not inspect.isasyncgen(serving):
        return await serving
    async for response in serving:
        await context.write(response)
    return None
