"""The one exception by which the service says no to a peer."""

from __future__ import annotations

import grpc


class RefusedError(Exception):
    """A request that is turned away with a gRPC status; the message says what was wrong and what to do."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> RefusedError:
    """The message itself is wrong, whatever the state of the service."""
    return RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)


def contradicts(message: str) -> RefusedError:
    """The message is well-formed but does not fit what is known."""
    return RefusedError(grpc.StatusCode.FAILED_PRECONDITION, message)


def unknown_deployment(name: str) -> RefusedError:
    """No agent has ever said Hello for this deployment."""
    return RefusedError(
        grpc.StatusCode.NOT_FOUND, f"no deployment {name!r}; `eplb deployments` lists those that are known"
    )
