"""Entry points of engines' plugins: an engine calls them in every process, perhaps more than once.

Each does nothing unless ``EPLB_AGENT_SERVICE`` names a service, and imports nothing of an engine before. An engine
release that its adapter does not know raises ``UnsupportedEngineError``; nothing of the engine is patched then.
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


class _EnginesLog(logging.Handler):
    """Hands records to an engine's own handlers: the engine configures its own loggers alone, not those of plugins."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = logging.getLogger(engine)

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as one of the engine's."""
        if self._engine.isEnabledFor(record.levelno):
            self._engine.handle(record)


def _log_as(engine: str) -> None:
    own = logging.getLogger("eplb")
    if not own.handlers:
        own.addHandler(_EnginesLog(engine))
        own.setLevel(logging.DEBUG)  # the engine's own level decides
        own.propagate = False


def register_vllm() -> None:
    """Hand vLLM's EPLB over to the agent, but in vLLM-Ascend, which has an adapter of its own."""
    if _is_requested() and importlib.util.find_spec("vllm_ascend") is None:
        _put_into_vllm("worker_agent.adapters.vllm.hooks", "vLLM where --enable-eplb is given")


def register_vllm_ascend() -> None:
    """Put the agent in place of vLLM-Ascend's balancer."""
    if _is_requested() and importlib.util.find_spec("vllm_ascend") is not None:
        _put_into_vllm("worker_agent.adapters.vllm_ascend.hooks", "vLLM-Ascend where dynamic_eplb is on")


def _put_into_vllm(hooks: str, where: str) -> None:
    if hooks not in _installed:
        _log_as("vllm")
        importlib.import_module(hooks).install()
        _installed.add(hooks)
        _report(where)


def register_sglang() -> None:
    """Put the agent in place of SGLang's EPLB manager; SGLang calls this once per process.

    Raises
    ------
    SystemExit
        Where this SGLang is none that the adapter knows, or settings do not fit. SGLang logs whatever else a plugin
        raises and serves on, with its own balancer where the user had asked for this one.
    """
    if not _is_requested():
        return
    from worker_agent.adapters.sglang import hooks

    try:
        hooks.install()
    except (UnsupportedEngineError, ValueError) as error:
        raise SystemExit(str(error)) from error
    _report("SGLang where --enable-eplb is given")


def _report(where: str) -> None:
    _log.info("eplb-agent balances expert-parallel layers of this %s", where)


def _is_requested() -> bool:
    requested = bool(os.environ.get("EPLB_AGENT_SERVICE", "").strip())
    if not requested:
        _warn_of_misspelt_names()
    return requested


@cache
def _warn_of_misspelt_names() -> None:
    """Name settings that were meant for the agent, where none starts that would."""
    if any(name.upper().startswith("EPLB_AGENT") for name in os.environ):
        from worker_agent.settings import misspelt

        for complaint in misspelt(os.environ):
            _log.warning("eplb-agent does nothing, as EPLB_AGENT_SERVICE names no service: %s", complaint)
