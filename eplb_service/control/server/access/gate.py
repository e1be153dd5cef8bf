"""What every call passes before its handler runs: who calls, whether that caller may, and whether there is room.

Nothing of a call's body is read until all of that is decided. gRPC reads the one message of a unary call before it runs
the handler, so unary calls are served as streams here: an answer to somebody unknown costs no more than its headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from eplb_service.control.core.errors import ExhaustedError, RefusedError
from eplb_service.control.server.access.credentials import ANYONE, Credential, Credentials, Role
from eplb_service.control.server.access.quotas import Quotas, host_of
from eplb_service.control.server.bounded_log import BoundedLog
from eplb_service.control.server.grpc_status import StatusError, code_of
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.fields import WireError, printable

_log = structlog.get_logger(__name__)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]

_MESSAGE_SECONDS = 10.0
_OPERATOR = "/eplb.v1.OperatorService/"
_READ = frozenset({"ListDeployments", "GetStatus", "GetPlacement", "GetHistory", "GetBalance", "WatchHeat"})
_READERS, _OPERATORS, _AGENTS = (
    frozenset({Role.READER, Role.OPERATOR}),
    frozenset({Role.OPERATOR}),
    frozenset({Role.AGENT}),
)
_OPEN = "/grpc.health.v1.Health/"
"""Probes of orchestrators bring no credentials, and health gives nothing away."""


@dataclass(frozen=True)
class Caller:
    """Who has made the call that is being answered, and from which host."""

    credential: Credential
    host: str


_caller: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Who has made the call that is being answered."""
    return _caller.get()


@contextlib.contextmanager
def acting_as(caller: Caller) -> Iterator[None]:
    """Within it, ``caller`` has made the call that is being answered."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Turns calls away, or hands them on.

    Parameters
    ----------
    credentials
        Those that callers must have.
    quotas
        What each host may take.
    metrics, log
        Where refusals and the calls of operators are counted and written down.
    """

    def __init__(self, credentials: Credentials, quotas: Quotas, metrics: Metrics, log: BoundedLog) -> None:
        self._credentials = credentials
        self._quotas = quotas
        self._metrics = metrics
        self._log = log
        self._open: dict[asyncio.Task[Any], Credential] = {}

    def refresh(self) -> None:
        """Look whether other credentials hold now; calls under one that no longer does end."""
        if not self._credentials.refresh():
            return
        for task, credential in list(self._open.items()):
            if not self._credentials.holds(credential):
                _log.warning("credential_withdrawn", caller=credential.name)
                task.cancel()

    @property
    def asks_for_credentials(self) -> bool:
        """Whether callers must prove who they are."""
        return self._credentials.asked

    def note_refusal(self, method: str, host: str, error: StatusError | RefusedError | WireError) -> None:
        """A call from ``host`` was turned away: counted, and written down at a bounded rate."""
        self._note_refused(method, host, code_of(error), str(error))

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler behind the gate."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        token = _token(dict(handler_call_details.invocation_metadata or ()))

        async def guarded(requests: Any, context: Any) -> Any:
            host = host_of(context.peer())
            try:
                caller = Caller(self.admitted(method, token, _certificate_names(context)), host)
                with self._quotas.call(host):
                    return await self._served(handler, method, caller, requests, context)
            except (StatusError, RefusedError, WireError) as error:
                code, reason = code_of(error), str(error)
            # Outside the handler: the error's traceback holds the message that was refused, and is let go of first.
            self._note_refused(method, host, code, reason)
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
        """The caller's credential; raises ``StatusError`` where there is none, or it has not the role."""
        if method.startswith(_OPEN):
            return ANYONE
        credential = self._credentials.of(token, certificate_names)
        if credential is None:
            raise StatusError(
                grpc.StatusCode.UNAUTHENTICATED,
                "this service asks for 'authorization: Bearer TOKEN' or a client certificate; "
                f"{'the token is wrong' if token else 'there was none'}",
            )
        roles = _roles_for(method)
        if not roles & credential.roles:
            asked = " or ".join(sorted(role.value for role in roles))
            raise StatusError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{credential.name!r} may not call {method.rpartition('/')[2]}, which is for {asked}",
            )
        return credential

    def _note_refused(self, method: str, host: str, code: grpc.StatusCode, reason: str) -> None:
        self._metrics.service.refusals.labels(code.name.lower()).inc()
        self._log.warning("call_refused", method=method, peer=host, code=code.name, reason=reason)

    async def _served(self, handler: Any, method: str, caller: Caller, requests: Any, context: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = caller.credential
        try:
            with acting_as(caller):
                return await self._handled(handler, method, caller, requests, context)
        finally:
            del self._open[task]

    async def _handled(self, handler: Any, method: str, caller: Caller, requests: Any, context: Any) -> Any:
        if handler.request_streaming:
            serve = handler.stream_stream or handler.stream_unary
            return await _answered(serve(requests, context), context)
        async with self._quotas.first_message(caller.host):
            request = await _only_message(context)
        check_reach(caller.credential, request)
        serve = handler.unary_stream or handler.unary_unary
        if method.startswith(_OPERATOR) and method.rpartition("/")[2] not in _READ:
            return await self._audited(serve(request, context), method, caller, request)
        return await _answered(serve(request, context), context)

    async def _audited(self, answer: Awaitable[Any], method: str, caller: Caller, request: Any) -> Any:
        """An operator's order is written down with who gave it, whether or not it is carried out."""
        name, result = method.rpartition("/")[2], "failed"
        try:
            answered = await answer
            result = "done"
            return answered
        finally:
            self._metrics.service.operator_calls.labels(name, result).inc()
            _log.info(
                "operator_call",
                call=name,
                deployment=printable(request.deployment),
                caller=caller.credential.name,
                peer=caller.host,
                result=result,
            )


def _roles_for(method: str) -> frozenset[Role]:
    if method.startswith(_OPERATOR):
        return _READERS if method.rpartition("/")[2] in _READ else _OPERATORS
    return _AGENTS if method.startswith("/eplb.v1.AgentService/") else _READERS


def check_reach(credential: Credential, request: Any) -> None:
    """Raise ``StatusError`` where ``request`` is of a deployment that the caller has no say in."""
    name = getattr(request, "deployment", None)
    if isinstance(name, str) and not credential.reaches(name):
        raise StatusError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{credential.name!r} has no say in deployment {printable(name)!r}",
        )


def _token(metadata: Mapping[str, str | bytes]) -> str:
    given = metadata.get("authorization", "")
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    kind, _, token = text.partition(" ")
    return token if kind == "Bearer" else ""


def _certificate_names(context: Any) -> Iterable[str]:
    """Names in a client certificate that the listener has verified; none without mutual TLS."""
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
