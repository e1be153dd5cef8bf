"""Refusals of the core, one exception per kind; the text says what was wrong and what to do."""

from __future__ import annotations


class RefusedError(Exception):
    """A rank or an operator is turned away."""


class ConflictError(RefusedError):
    """A request that is well-formed but does not fit what is known."""


class AlreadyConnectedError(RefusedError):
    """A second agent for a rank whose first is alive."""


class UnknownDeploymentError(RefusedError):
    """No agent has ever introduced itself for this deployment."""


class ExhaustedError(RefusedError):
    """A bound of the service has been reached."""


class NotStoredError(RefusedError):
    """A command was carried out, but a restart of the service would forget it."""
