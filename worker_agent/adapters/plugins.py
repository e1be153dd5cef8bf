"""Plugin entry points. Each engine calls its own entry point in every process, possibly more than once.

``modes.requested_mode`` determines what is installed. If no mode is requested, the entry points do nothing and import
nothing from the engine. If the mode does not support the engine's release, they raise ``UnsupportedEngineError`` before
patching the engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import cache

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.modes import Mode, has_service, requested_mode

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


_HOOKS = {
    ("full", "vllm"): "worker_agent.adapters.vllm.hooks",
    ("full", "vllm_ascend"): "worker_agent.adapters.vllm_ascend.hooks",
    ("full", "sglang"): "worker_agent.adapters.sglang.hooks",
    ("policy", "vllm"): "worker_agent.policy.vllm",
    ("policy", "vllm_ascend"): "worker_agent.policy.vllm_ascend",
    ("policy", "sglang"): "worker_agent.policy.sglang",
    ("observe", "vllm"): "worker_agent.observe.vllm",
    ("observe", "vllm_ascend"): "worker_agent.observe.vllm_ascend",
    ("observe", "sglang"): "worker_agent.observe.sglang",
}
"""Module that installs each mode into each engine."""
_EFFECTS = {
    "full": "balances the expert-parallel layers of",
    "policy": "makes the EPLB decisions for",
    "observe": "records the expert heat of",
}


def register_vllm() -> None:
    """Install the requested mode into vLLM. ``register_vllm_ascend`` handles vLLM-Ascend."""
    mode = _requested_mode()
    if mode is not None and importlib.util.find_spec("vllm_ascend") is None:
        _log_to("vllm")
        _install(mode, "vllm", "vLLM" if mode == "observe" else "vLLM with --enable-eplb")


def register_vllm_ascend() -> None:
    """Install the requested mode into vLLM-Ascend."""
    mode = _requested_mode()
    if mode is not None and importlib.util.find_spec("vllm_ascend") is not None:
        _log_to("vllm")
        _install(mode, "vllm_ascend", "vLLM-Ascend with dynamic_eplb")


def register_sglang() -> None:
    """Install the requested mode into SGLang, which calls this once per process.

    Raises
    ------
    SystemExit
        If the mode does not support this SGLang release, or if the agent's settings are invalid. SGLang would merely
        log any other exception and then serve with its own balancer, even though the user asked for the agent.
    """
    try:
        mode = _requested_mode()
        if mode is not None:
            _install(mode, "sglang", "SGLang" if mode == "observe" else "SGLang with --enable-eplb")
    except (UnsupportedEngineError, ValueError) as error:
        raise SystemExit(str(error)) from error


def _install(mode: Mode, engine: str, description: str) -> None:
    """Install a mode into an engine once per process. Policy mode with a service also installs observe mode."""
    hooks = _HOOKS[mode, engine]
    if hooks in _installed:
        return
    importlib.import_module(hooks).install()
    _installed.add(hooks)
    _log.info("eplb-agent %s %s", _EFFECTS[mode], description)
    if mode == "policy" and has_service():
        # The observer counts choices before policy mode's step split maps them, so its hooks must be the outer ones.
        try:
            _install("observe", engine, description)
        except Exception:
            _log.exception("the service will not show this engine's heat, but policy mode still works")


def _requested_mode() -> Mode | None:
    mode = requested_mode()
    if mode is None:
        _warn_of_misspelt_names()
    return mode


@cache
def _warn_of_misspelt_names() -> None:
    """Log misspelt agent settings, because no agent will start and report them."""
    if any(name.upper().startswith("EPLB_AGENT") for name in os.environ):
        from worker_agent.settings import misspelt_settings

        for complaint in misspelt_settings(os.environ):
            _log.warning(
                "eplb-agent does nothing because neither EPLB_AGENT_MODE nor EPLB_AGENT_SERVICE is set: %s",
                complaint,
            )
