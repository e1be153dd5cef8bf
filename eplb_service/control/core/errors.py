"""Errors of the core, one exception per kind of rejection. Each message states the problem and what to do."""

from __future__ import annotations


class RefusedError(Exception):
    """Rejection of a rank or of an operator's command."""


class ConflictError(RefusedError):
    """Rejection of a well-formed request that contradicts the state of the deployment."""


class AlreadyConnectedError(RefusedError):
    """Rejection of a second agent for a rank whose first agent is still connected."""


class UnknownDeploymentError(RefusedError):
    """Rejection of a request for a deployment that no agent has ever connected for."""


class ExhaustedError(RefusedError):
    """Rejection of a request that would exceed a limit of the service."""


class NotStoredError(RefusedError):
    """Warning that a command was executed but not stored, so that a restart of the service loses it."""
