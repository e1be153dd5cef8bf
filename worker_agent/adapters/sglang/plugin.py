"""Entry point ``sglang.srt.plugins``: SGLang calls it in every process, once."""

from __future__ import annotations

import logging

from worker_agent.adapters.activation import is_requested
from worker_agent.adapters.errors import UnsupportedEngineError

_log = logging.getLogger("eplb.agent")


def register() -> None:
    """Have the agent take the place of SGLang's EPLB manager, where ``EPLB_AGENT_SERVICE`` names a service.

    Without that variable it does nothing, and with EPLB off there is nothing for it to replace.

    Raises
    ------
    SystemExit
        Where this SGLang is none that the adapter knows; nothing is hooked then. SGLang logs whatever else a plugin
        raises and serves on, with its own balancer where the user had asked for this one.
    """
    if not is_requested():
        return
    from worker_agent.adapters.sglang import hooks

    try:
        hooks.install()
    except UnsupportedEngineError as error:
        raise SystemExit(str(error)) from error
    _log.info("eplb-agent balances expert-parallel layers of this SGLang where --enable-eplb is given")
