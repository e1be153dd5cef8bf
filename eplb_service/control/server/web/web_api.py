"""What browsers may ask over HTTP: the calls that only read, answered by the same code behind the same gate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import grpc

from eplb_service import __version__
from eplb_service.control.core.errors import RefusedError
from eplb_service.control.server.access.gate import Caller, Gate, acting_as, check_reach
from eplb_service.control.server.grpc_status import StatusError, code_of
from eplb_service.control.server.operators.operator_api import OperatorService
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import operator_pb2

PREFIX = "/api/v1/"
"""Where the paths of this interface begin."""

_SERVICE = "/eplb.v1.OperatorService/"
_PLANS = 20
_DEPLOYMENT = re.compile(r"deployments/([^/]+)(?:/(balance|history))?")
_CALLS: dict[str | None, tuple[str, type[Any], dict[str, Any]]] = {
    None: ("GetStatus", operator_pb2.GetStatusRequest, {}),
    "balance": ("GetBalance", operator_pb2.GetBalanceRequest, {}),
    "history": ("GetHistory", operator_pb2.GetHistoryRequest, {"limit": _PLANS}),
}
_HTTP = {
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
}


class HttpError(Exception):
    """A request that is answered with ``status`` and the message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class WebApi:
    """The JSON interface; everything here runs on the service's event loop.

    Parameters
    ----------
    operators, gate
        What answers, and who decides whether it may.
    """

    def __init__(self, operators: OperatorService, gate: Gate) -> None:
        self._operators = operators
        self._gate = gate

    @property
    def asks_for_credentials(self) -> bool:
        """Whether callers must prove who they are."""
        return self._gate.asks_for_credentials

    async def answer(self, path: str, token: str, certificate_names: Iterable[str], host: str) -> Any:
        """The message, or document, that ``path`` after ``PREFIX`` names; raises ``HttpError``."""
        call, request = _asked(path)
        method = _SERVICE + call
        try:
            credential = self._gate.admitted(method, token, certificate_names)
            check_reach(credential, request)
            if path == "service":
                return {"version": __version__}
            with acting_as(Caller(credential, host)):
                return await getattr(self._operators, call)(request, None)
        except (StatusError, RefusedError, WireError) as error:
            self._gate.note_refusal(f"GET {PREFIX}{call}", host, error)
            raise HttpError(_HTTP.get(code_of(error), HTTPStatus.BAD_REQUEST), str(error)) from error


def _asked(path: str) -> tuple[str, Any]:
    """The call that answers a path, and its request."""
    if path in ("service", "deployments"):
        return "ListDeployments", operator_pb2.ListDeploymentsRequest()
    match = _DEPLOYMENT.fullmatch(path)
    if match is None:
        raise HttpError(
            HTTPStatus.NOT_FOUND, "there is nothing here; the runbook lists the paths of this interface"
        )
    call, request, fields = _CALLS[match[2]]
    return call, request(deployment=match[1], **fields)
