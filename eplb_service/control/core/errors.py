"""Exceptions of the core, one per kind of rejection. Each message states the problem and how to fix it."""

from __future__ import annotations


class RejectedError(Exception):
    """Raised when a rank or an operator's command is rejected."""


class ConflictError(RejectedError):
    """Raised when a well-formed request conflicts with the state of the deployment."""


class AlreadyConnectedError(RejectedError):
    """Raised when a second agent connects for a rank whose first agent is still connected."""


class UnknownDeploymentError(RejectedError):
    """Raised when a request names a deployment that no agent has ever joined."""


class ExhaustedError(RejectedError):
    """Raised when a request would exceed a limit of the service."""


class NotStoredError(RejectedError):
    """Raised when a command took effect but could not be stored, so that a restart of the service would lose it."""
