"""When an engine's plugin hook should do anything at all: only where the user named a service."""

from __future__ import annotations

import os
from collections.abc import Mapping

SERVICE_VARIABLE = "EPLB_AGENT_SERVICE"
"""Names the service as ``host:port``; without it, an installed agent leaves every engine as it is."""


def is_requested(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process should be balanced.

    Parameters
    ----------
    environment
        Environment variables; by default those of this process.

    Returns
    -------
    bool
        True where ``EPLB_AGENT_SERVICE`` is set to more than blanks.
    """
    environment = os.environ if environment is None else environment
    return bool(environment.get(SERVICE_VARIABLE, "").strip())
