"""Plugin entry points. Each engine calls its own entry point in every process, possibly more than once.

If ``EPLB_AGENT_SERVICE`` is not set, the entry points do nothing and import nothing from the engine. If the adapter
does not support the engine's release, they raise ``UnsupportedEngineError`` before patching the engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import cache

from worker_agent.adapters.compat import UnsupportedEngineError

_log = logging.getLogger("eplb.agent")
_installed: set[str] = set()


class _EngineLogHandler(logging.Handler):
    """Forwards records to the engine's logger, because engines configure only their own loggers, not plugins'."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = logging.getLogger(engine)

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record with the engine's logger."""
        if self._engine.isEnabledFor(record.levelno):
            self._engine.handle(record)


def _log_to(engine: str) -> None:
    """Log the agent's records with the engine's logger, unless the application has configured the agent's logger."""
    agent_log = logging.getLogger("eplb")
    if not agent_log.handlers:
        agent_log.addHandler(_EngineLogHandler(engine))
        agent_log.setLevel(logging.DEBUG)  # the level of the engine's logger applies
        agent_log.propagate = False


def register_vllm() -> None:
    """Replace vLLM's balancer with the agent. ``register_vllm_ascend`` handles vLLM-Ascend."""
    if _is_requested() and importlib.util.find_spec("vllm_ascend") is None:
        _install_into_vllm("worker_agent.adapters.vllm.hooks", "vLLM with --enable-eplb")


def register_vllm_ascend() -> None:
    """Replace vLLM-Ascend's balancer with the agent."""
    if _is_requested() and importlib.util.find_spec("vllm_ascend") is not None:
        _install_into_vllm("worker_agent.adapters.vllm_ascend.hooks", "vLLM-Ascend with dynamic_eplb")


def _install_into_vllm(hooks: str, engine: str) -> None:
    if hooks not in _installed:
        _log_to("vllm")
        importlib.import_module(hooks).install()
        _installed.add(hooks)
        _log_installation(engine)


def register_sglang() -> None:
    """Replace SGLang's EPLB manager with the agent. SGLang calls this once per process.

    Raises
    ------
    SystemExit
        If the adapter does not support this SGLang release, or if the agent's settings are invalid. SGLang would merely
        log any other exception and then serve with its own balancer, even though the user asked for the agent.
    """
    if not _is_requested():
        return
    from worker_agent.adapters.sglang import hooks

    try:
        hooks.install()
    except (UnsupportedEngineError, ValueError) as error:
        raise SystemExit(str(error)) from error
    _log_installation("SGLang with --enable-eplb")


def _log_installation(engine: str) -> None:
    _log.info("eplb-agent balances the expert-parallel layers of %s", engine)


def _is_requested() -> bool:
    requested = bool(os.environ.get("EPLB_AGENT_SERVICE", "").strip())
    if not requested:
        _warn_of_misspelt_names()
    return requested


@cache
def _warn_of_misspelt_names() -> None:
    """Log misspelt agent settings, because no agent will start and report them."""
    if any(name.upper().startswith("EPLB_AGENT") for name in os.environ):
        from worker_agent.settings import misspelt_settings

        for complaint in misspelt_settings(os.environ):
            _log.warning("eplb-agent does nothing because EPLB_AGENT_SERVICE is not set: %s", complaint)
