"""Entry points of engines' plugins: an engine calls them in every process, perhaps more than once.

Each does nothing unless ``EPLB_AGENT_SERVICE`` names a service, and imports nothing of an engine before. An engine
release that its adapter does not know raises ``UnsupportedEngineError``; nothing of the engine is patched then.
"""

from __future__ import annotations

import importlib.util
import logging
import os

from worker_agent.adapters.compat import UnsupportedEngineError

_log = logging.getLogger("eplb.agent")
_installed: set[str] = set()


def register_vllm() -> None:
    """Hand vLLM's EPLB over to the agent, but in vLLM-Ascend, which has an adapter of its own."""
    if _is_requested() and "vllm" not in _installed and importlib.util.find_spec("vllm_ascend") is None:
        from worker_agent.adapters.vllm import hooks

        hooks.install()
        _report("vllm", "vLLM where --enable-eplb is given")


def register_vllm_ascend() -> None:
    """Put the agent in place of vLLM-Ascend's balancer."""
    if _is_requested() and "vllm_ascend" not in _installed and importlib.util.find_spec("vllm_ascend"):
        from worker_agent.adapters.vllm_ascend import hooks

        hooks.install()
        _report("vllm_ascend", "vLLM-Ascend where dynamic_eplb is on")


def register_sglang() -> None:
    """Put the agent in place of SGLang's EPLB manager; SGLang calls this once per process.

    Raises
    ------
    SystemExit
        Where this SGLang is none that the adapter knows. SGLang logs whatever else a plugin raises and serves on, with
        its own balancer where the user had asked for this one.
    """
    if not _is_requested():
        return
    from worker_agent.adapters.sglang import hooks

    try:
        hooks.install()
    except UnsupportedEngineError as error:
        raise SystemExit(str(error)) from error
    _report("sglang", "SGLang where --enable-eplb is given")


def _report(package: str, where: str) -> None:
    _installed.add(package)
    _log.info("eplb-agent balances expert-parallel layers of this %s", where)


def _is_requested() -> bool:
    return bool(os.environ.get("EPLB_AGENT_SERVICE", "").strip())
