"""Which gRPC status a caller gets for each error: the one place where errors become statuses."""

from __future__ import annotations

import grpc

from eplb_service.control.core.errors import (
    AlreadyConnectedError,
    ConflictError,
    ExhaustedError,
    RefusedError,
    UnknownDeploymentError,
)
from eplb_service.wire.fields import ProtocolVersionError, WireError

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (ProtocolVersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (AlreadyConnectedError, grpc.StatusCode.ALREADY_EXISTS),
    (UnknownDeploymentError, grpc.StatusCode.NOT_FOUND),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)


class StatusError(Exception):
    """A call ends with a status for a reason of the server's own."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: StatusError | RefusedError | WireError) -> grpc.StatusCode:
    """The status that the caller gets."""
    if isinstance(error, StatusError):
        return error.code
    return next(code for kind, code in _CODES if isinstance(error, kind))
