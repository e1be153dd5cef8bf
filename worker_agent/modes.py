"""Mode of the agent inside an engine, as requested by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias, cast, get_args

Mode: TypeAlias = Literal["observe", "policy", "full"]
"""Role of the agent inside an engine.

- ``observe``: the agent records heat and step times, and changes nothing.
- ``policy``: this project's planner decides inside the engine's own EPLB, which moves the weights. If a service is set,
  the agent also observes the engine.
- ``full``: the agent replaces the engine's EPLB. It moves the weights according to the service's plans.
"""


def has_service(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``EPLB_AGENT_SERVICE`` names a service."""
    return bool(environment.get("EPLB_AGENT_SERVICE", "").strip())


def requested_mode(environment: Mapping[str, str] = os.environ) -> Mode | None:
    """Return the mode that ``EPLB_AGENT_MODE`` and ``EPLB_AGENT_SERVICE`` request; ``None`` if neither is set.

    The mode is ``full`` if only ``EPLB_AGENT_SERVICE`` is set.

    Parameters
    ----------
    environment
        Environment variables of the engine's process.

    Raises
    ------
    ValueError
        If the mode does not exist, or if it needs a service and none is set.

    Examples
    --------
    >>> requested_mode({"EPLB_AGENT_SERVICE": "eplb.example:50551"})
    'full'
    >>> requested_mode({"EPLB_AGENT_MODE": "policy"})
    'policy'
    >>> requested_mode({"EPLB_AGENT_MODE": "full"})
    Traceback (most recent call last):
        ...
    ValueError: EPLB_AGENT_MODE=full needs a service; set EPLB_AGENT_SERVICE to its host:port
    """
    service = has_service(environment)
    mode = environment.get("EPLB_AGENT_MODE", "").strip().lower()
    if not mode:
        return "full" if service else None
    if mode not in get_args(Mode):
        raise ValueError(f"EPLB_AGENT_MODE is {mode!r}; set it to observe, policy or full")
    if mode == "full" and not service:
        raise ValueError("EPLB_AGENT_MODE=full needs a service; set EPLB_AGENT_SERVICE to its host:port")
    return cast(Mode, mode)
