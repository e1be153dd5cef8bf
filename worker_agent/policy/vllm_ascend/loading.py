"""Refuse to load weights into a running vLLM-Ascend engine whose EPLB moves experts.

vLLM-Ascend loads weights into its initial placement, regardless of later moves by its EPLB, and keeps the tables of the
current placement. All output after such a load would be wrong, and no error would be logged. Unlike in vLLM
(``worker_agent.policy.reload``), returning the experts first would not be enough:

- In the first runner from 0.30, vLLM also overwrites the tables with uninitialised memory.
- In the first runner, the lists of quantised experts get new tensors, while EPLB keeps moving the old ones.
- In the second runner, EPLB is always asynchronous, so it moves experts only in later steps.

Calls of ``model.load_weights`` from a worker extension are not detected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.policy.reload import ReloadError

_LOADING = ("reload_weights", "start_weight_update", "update_weights")
"""Methods of the worker or the model runner that load weights, or start a session that does."""
_REMEDY = "restart the engine to load weights, or start it without dynamic_eplb or --enable-eplb"


def refuse_loading(runner: Any) -> None:
    """Patch this process's worker and model runner, so that weights are loaded only when the engine starts.

    Call this when the engine creates its EPLB. An engine without EPLB may load weights at any time.

    Parameters
    ----------
    runner
        The class ``NPUModelRunner`` that this engine uses.

    Raises
    ------
    UnsupportedEngineError
        If other engines could load this engine's weights while it serves (``netloader``).
    """
    from vllm.config import get_current_vllm_config
    from vllm_ascend.worker.worker import NPUWorker

    if get_current_vllm_config().load_config.load_format == "netloader":
        raise UnsupportedEngineError(
            "--load-format netloader",
            "Engines that start from this one would receive experts in the slots to which EPLB has moved them, and "
            "would use the initial tables",
            "Use another load format, or turn EPLB off",
        )
    for owner in (NPUWorker, runner):
        for name in _LOADING:
            if hasattr(owner, name):
                setattr(owner, name, _refusing(getattr(owner, name)))
    NPUWorker.sleep = _sleep_without_discarding(NPUWorker.sleep)


def _refusing(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def refuse(*_arguments: Any, **_keywords: Any) -> Any:
        raise ReloadError(
            f"{load.__name__}: vLLM-Ascend would load the weights into its initial placement, although its EPLB moves "
            f"experts; {_REMEDY}"
        )

    return refuse


def _sleep_without_discarding(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(sleep)
    def sleep_unless_discarding(self: Any, level: int = 1) -> Any:
        if level > 1:
            raise ReloadError(
                f"sleep: level {level} discards the weights, and they cannot be loaded again while EPLB moves experts; "
                f"call wake_up to continue, and use level 1, or {_REMEDY}"
            )
        return sleep(self, level)

    return sleep_unless_discarding
