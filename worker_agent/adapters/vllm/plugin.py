"""Entry point ``vllm.general_plugins``: vLLM calls it in every process, perhaps more than once."""

from __future__ import annotations

import importlib.util
import logging

from worker_agent.adapters.activation import is_requested

_log = logging.getLogger("eplb.agent")
_installed = False


def register() -> None:
    """Hand vLLM's EPLB over to the agent, where ``EPLB_AGENT_SERVICE`` names a service; else do nothing.

    Raises
    ------
    UnsupportedEngineError
        Where this vLLM is none that the adapter knows. Nothing is patched then.
    """
    global _installed  # noqa: PLW0603  (vLLM calls a plugin once or more per process)
    # vLLM-Ascend balances by parts of its own, which have an adapter of theirs.
    if _installed or not is_requested() or importlib.util.find_spec("vllm_ascend") is not None:
        return
    from worker_agent.adapters.vllm import hooks

    hooks.install()
    _installed = True
    _log.info("eplb-agent balances expert-parallel layers of this vLLM where --enable-eplb is given")
