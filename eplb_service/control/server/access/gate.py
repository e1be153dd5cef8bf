"""Authentication, authorisation and quotas for every call.

Credentials come from a YAML file. The service reloads the file whenever it changes, so credentials can be rotated
without a restart::

    - name: decode-agents          # name of the caller in audit log lines
      role: agent                  # agent, operator or reader
      deployments: [decode]        # or ['*']
      ranks: 0-15                  # agents only; all ranks if absent
      token_sha256: 9f86d0...      # or `token:` with the token, or `certificate:` with a name in a client certificate

The gate checks a call before it reads any of its body. For a unary call, gRPC would read the message before it calls
the handler. Unary calls are therefore registered as streams, so that rejecting a call costs only its headers.
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
from eplb_service.control.core.errors import ExhaustedError, RejectedError
from eplb_service.control.server.access.quotas import Quotas, host_of
from eplb_service.control.server.listening import CallError, code_of
from eplb_service.control.server.settings import SettingsError
from eplb_service.telemetry.logs import BoundedLog
from eplb_service.telemetry.metrics import Metrics

_ALL = "*"
_MIN_TOKEN = 16
_MESSAGE_SECONDS = 10.0
_OPERATOR = "/eplb.v1.OperatorService/"
_READ = frozenset({"ListDeployments", "GetStatus", "GetPlacement", "GetHistory", "GetBalance", "WatchHeat"})
_OPEN = "/grpc.health.v1.Health/"
"""Prefix of calls that need no authentication, because orchestrators probe without credentials and health is not
confidential."""

_log = structlog.get_logger(__name__)


_Role: TypeAlias = Literal["agent", "operator", "reader"]
"""Role of a caller. An agent represents ranks, an operator reads and sends commands, and a reader only reads."""
_EVERY_ROLE: frozenset[_Role] = frozenset(("agent", "operator", "reader"))


def _ranks(text: Any) -> frozenset[int]:
    """Parse a list of ranks.

    Examples
    --------
    >>> sorted(_ranks("0-3,8"))
    [0, 1, 2, 3, 8]
    """
    ranks: set[int] = set()
    for interval in str(text).split(","):
        first, _, last = interval.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"expected ranks such as 0-15 or 0,3, got {text!r}")
        low = int(first)
        high = int(last or first)
        if not low <= high < MAX_RANKS:
            raise ValueError(
                f"expected ranks 0 to {MAX_RANKS - 1} in ascending order, got {interval.strip()!r}"
            )
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def _checked_deployments(names: frozenset[str]) -> frozenset[str]:
    for name in names - {_ALL}:
        check_deployment(name, "deployments")
    return names


class Credential(BaseModel):
    """One entry in the credentials file: a proof of identity, and the caller's rights.

    Parameters
    ----------
    name
        Name of the caller in log lines.
    roles
        Role of the caller; the shared ``auth_token`` has all roles.
    deployments
        Names of the deployments that the caller may access; ``*`` stands for all.
    ranks
        Ranks that an agent may represent; ``None`` for all.
    token
        Token that proves the identity.
    token_sha256
        SHA-256 digest of that token, in hexadecimal.
    certificate
        Name in a verified client certificate that proves the identity.
    """

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
    def _check_proof(self) -> Credential:
        if sum(proof is not None for proof in (self.token, self.token_sha256, self.certificate)) != 1:
            raise ValueError("set exactly one of token, token_sha256 and certificate")
        if self.ranks is not None and "agent" not in self.roles:
            raise ValueError("only agents have ranks; remove ranks, or use the role agent")
        return self

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 digest of the token, or a value that matches no token if the credential has none."""
        return _digest(self.token) if self.token else bytes.fromhex(self.token_sha256 or "00" * 32)

    def reaches(self, deployment: str) -> bool:
        """Return True if the caller may access ``deployment``."""
        return _ALL in self.deployments or deployment in self.deployments

    def check_reach(self, request: Any, rank: int | None = None) -> None:
        """Raise ``CallError`` if the caller may not access the request's deployment or may not represent ``rank``."""
        name = getattr(request, "deployment", None)
        reason = ""
        if isinstance(name, str) and not self.reaches(name):
            reason = f"{self.name!r} may not access deployment {printable(name)!r}"
        elif rank is not None and self.ranks is not None and rank not in self.ranks:
            reason = f"{self.name!r} may not represent rank {rank}"
        if reason:
            raise CallError(grpc.StatusCode.PERMISSION_DENIED, reason)


_ANYONE = Credential.model_construct(
    name="anonymous", roles=_EVERY_ROLE, deployments=frozenset({_ALL}), ranks=None
)


class Credentials:
    """All credentials of a service: a shared token and the entries of a file.

    Raises ``SettingsError`` if the file is invalid. The message names the entry and the reason.

    Parameters
    ----------
    token
        Shared token with all roles; empty for none. Unlike the file, it cannot change while the service runs.
    path
        Credentials file, if any.
    """

    def __init__(self, token: str = "", path: Path | None = None) -> None:
        shared = Credential(
            name="auth_token",
            role=_EVERY_ROLE,
            deployments=frozenset({_ALL}),
            token_sha256=_digest(token).hex(),
        )
        self._shared = (shared,) if token else ()
        self._path = path
        self._content = b"" if path is None else _read_file(path)
        self._all = (
            self._shared if path is None else (*self._shared, *_parse_credentials(path, self._content))
        )
        self.are_asked_for = bool(self._all)

    def refresh(self) -> bool:
        """Reload the file if it has changed; return True if that changes the credentials.

        If the file is invalid, an error is logged and the previous credentials remain valid.
        """
        if self._path is None:
            return False
        previous = self._all
        try:
            content = _read_file(self._path)
            if content == self._content:
                return False
            self._content = content
            self._all = (*self._shared, *_parse_credentials(self._path, content))
        except SettingsError as error:
            _log.error("credentials_unreadable", reason=str(error))
            return False
        _log.info("credentials_read", credentials=len(self._all))
        return self._all != previous

    def hold(self, credential: Credential) -> bool:
        """Return True if ``credential`` is still valid."""
        return credential in self._all or not self.are_asked_for

    def proven_by(self, token: str, certificate_names: Iterable[str]) -> Credential | None:
        """Return the credential that a caller proves; ``None`` if it proves none.

        Parameters
        ----------
        token
            Token of the call; empty for none.
        certificate_names
            Names in the caller's verified client certificate.
        """
        if not self.are_asked_for:
            return _ANYONE
        digest = _digest(token)
        names = set(certificate_names)
        proven = None
        for credential in self._all:
            # Compare with every credential, so that the timing does not reveal which one matches.
            matches = bool(token) and hmac.compare_digest(digest, credential.digest)
            if matches or (credential.certificate and credential.certificate in names):
                proven = proven or credential
        return proven


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read the credentials: {error}") from error


def _parse_credentials(path: Path, content: bytes) -> tuple[Credential, ...]:
    """Parse the content of a credentials file; raises ``SettingsError`` if it is invalid."""
    try:
        entries = yaml.safe_load(content)
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply; it must be a list of credentials") from None
    except Exception:
        # Some values, such as impossible dates, raise errors other than YAMLError. Their messages quote the line, which
        # may contain a token, so they are dropped.
        raise SettingsError(f"{path} is not valid YAML") from None
    if not isinstance(entries, list) or not entries:
        raise SettingsError(f"{path} must be a list of at least one credential")
    credentials: dict[str, Credential] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            credential = Credential.model_validate(entry)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            field = "".join(f"{name}: " for name in problem["loc"][:1])
            message = problem["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{path}: credential {number}: {field}{message}") from None
        if credential.name in credentials:
            raise SettingsError(f"{path}: two credentials have the name {credential.name!r}; rename one")
        credentials[credential.name] = credential
    return tuple(credentials.values())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Caller(NamedTuple):
    """A caller's credential and host."""

    credential: Credential
    host: str


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Caller of the current call. Each call runs in a separate task and therefore in a separate context."""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """gRPC interceptor that authorises each call.

    Parameters
    ----------
    credentials
        Credentials of all callers.
    quotas
        Quotas per host and for all callers together.
    metrics
        Counters of rejected calls and of operator commands.
    log
        Rate-limited log of rejected calls.
    """

    def __init__(self, credentials: Credentials, quotas: Quotas, metrics: Metrics, log: BoundedLog) -> None:
        self.credentials = credentials
        self._quotas = quotas
        self._metrics = metrics
        self._log = log
        self._open: dict[asyncio.Task[Any], Credential] = {}

    def refresh(self) -> None:
        """Reload the credentials if they have changed, and end open calls whose credentials were withdrawn."""
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
        """Return a handler that authorises the call before it runs the original handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        token = _token(dict(handler_call_details.invocation_metadata or ()))

        async def guarded(requests: Any, context: Any) -> Any:
            host = host_of(context.peer())
            task = asyncio.current_task()
            assert task is not None
            try:
                caller = Caller(self.admitted(method, token, _certificate_names(context)), host)
                CALLER.set(caller)
                self._open[task] = caller.credential
                if method.startswith(_OPEN):
                    return await self._quotas.probe(
                        host, self._serve(handler, method, caller, requests, context)
                    )
                with self._quotas.call(host, proven=caller.credential is not _ANYONE):
                    return await self._serve(handler, method, caller, requests, context)
            except (CallError, RejectedError, WireError) as error:
                code = code_of(error)
                reason = str(error)
            finally:
                self._open.pop(task, None)
            # Respond outside the ``except`` block, because the error's traceback would keep the rejected message in
            # memory.
            self.note_refusal(method, host, code, reason)
            await context.abort(code, reason)
            return None

        make_handler: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        guarded_handler: grpc.RpcMethodHandler[Any, Any] = make_handler(
            guarded, handler.request_deserializer, handler.response_serializer
        )
        return guarded_handler

    def admitted(self, method: str, token: str, certificate_names: Iterable[str]) -> Credential:
        """Return the caller's credential; raises ``CallError`` if it is missing or does not permit the call."""
        if method.startswith(_OPEN):
            return _ANYONE
        credential = self.credentials.proven_by(token, certificate_names)
        if credential is None:
            raise CallError(
                grpc.StatusCode.UNAUTHENTICATED,
                "this service requires 'authorization: Bearer TOKEN' or a client certificate, but "
                f"{'the token is wrong' if token else 'the call has neither'}",
            )
        roles = _roles_for(method)
        if not roles & credential.roles:
            required = " or ".join(sorted(roles))
            raise CallError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{credential.name!r} may not call {method.rpartition('/')[2]}, which requires the role {required}",
            )
        return credential

    def note_refusal(self, method: str, host: str, code: grpc.StatusCode, reason: str) -> None:
        """Count a rejected call, and log it at a limited rate."""
        self._metrics.count("eplb_refusals", code.name.lower())
        self._log.warning("call_refused", method=method, peer=host, code=code.name, reason=reason)

    async def _serve(self, handler: Any, method: str, caller: Caller, requests: Any, context: Any) -> Any:
        if handler.request_streaming:
            serve = handler.stream_stream or handler.stream_unary
            return await _send_responses(serve(requests, context), context)
        request = await _only_message(context)
        caller.credential.check_reach(request)
        serve = handler.unary_stream or handler.unary_unary
        if method.startswith(_OPERATOR) and method.rpartition("/")[2] not in _READ:
            return await self._audit(serve(request, context), method, caller, request)
        return await _send_responses(serve(request, context), context)

    async def _audit(self, serving: Awaitable[Any], method: str, caller: Caller, request: Any) -> Any:
        """Await an operator's command, and log it with its caller and its result."""
        name = method.rpartition("/")[2]
        result = "failed"
        try:
            response = await serving
            result = "done"
            return response
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
    is_command = method.startswith(_OPERATOR) and method.rpartition("/")[2] not in _READ
    return {"operator"} if is_command else {"reader", "operator"}


def _token(metadata: Mapping[str, str | bytes]) -> str:
    header = metadata.get("authorization", "")
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    kind, _, token = text.partition(" ")
    return token if kind == "Bearer" else ""


def _certificate_names(context: Any) -> Iterable[str]:
    """Yield the names in the client certificate that the listener has verified; no names without mutual TLS."""
    properties: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        yield from (value.decode("utf-8", "replace") for value in properties.get(key, ()))


async def _only_message(context: Any) -> Any:
    try:
        request = await asyncio.wait_for(context.read(), _MESSAGE_SECONDS)
    except asyncio.TimeoutError:
        raise ExhaustedError(
            f"the request did not arrive within {_MESSAGE_SECONDS:g} seconds; retry"
        ) from None
    if request == grpc.aio.EOF:
        raise WireError("the call contains no request")
    return request


async def _send_responses(serving: Any, context: Any) -> Any:
    if not inspect.isasyncgen(serving):
        return await serving
    async for response in serving:
        await context.write(response)
    return None
