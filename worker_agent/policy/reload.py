"""Weight loading in vLLM's policy mode: experts return to the slots that vLLM loads them into.

vLLM loads weights into its initial placement, regardless of later moves by its EPLB, and keeps the tables of the
current placement. Without this module, all output after such a load would be wrong, and no error would be logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from worker_agent.policy.figures import Int64

_log = logging.getLogger("eplb.agent")

_LOADING = ("reload_weights", "start_weight_update")
"""Methods of vLLM's worker that load weights, or start a session that does."""


class ReloadError(RuntimeError):
    """Raised if vLLM would load weights into slots that now hold other experts."""


def return_before_loading(return_experts: Callable[[Any], None]) -> None:
    """Patch vLLM's worker so that ``return_experts`` is called with the ``EplbState`` before weights are loaded.

    Parameters
    ----------
    return_experts
        Function that returns all experts to their initial slots, or raises ``ReloadError`` (collective).
    """
    from vllm.v1.worker.gpu_worker import Worker

    def patched(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def call_with_experts_returned(self: Any, *arguments: Any, **keywords: Any) -> Any:
            state = getattr(self.model_runner, "eplb_state", None)
            if state is not None:
                return_experts(state)
            return call(self, *arguments, **keywords)

        return call_with_experts_returned

    for name in _LOADING:
        if hasattr(Worker, name):
            setattr(Worker, name, patched(getattr(Worker, name)))


def return_experts(
    state: Any, initial: dict[str, Int64], rearrange_to: Callable[[list[Int64]], None]
) -> None:
    """Return the experts of all models to their initial slots (collective over the EP group).

    Parameters
    ----------
    state
        vLLM's ``EplbState``.
    initial
        Initial placement of each model, int64 ``[L, P]``, keyed as in ``state.model_states``.
    rearrange_to
        Function that makes vLLM's synchronous EPLB move the experts of all models to the given placements.

    Raises
    ------
    ReloadError
        If vLLM's EPLB is asynchronous, so that it moves experts only in later steps, or if an expert did not return.
    """
    moved = _moved(state, initial)
    if not moved:
        return
    if state.is_async:
        raise ReloadError(
            "vLLM's asynchronous EPLB has moved experts, so vLLM would load the new weights into the wrong slots; "
            "start with --eplb-config '{\"use_async\": false}', or restart the engine to load weights"
        )
    _log.info("vLLM is loading weights, so all experts return to their initial slots")
    rearrange_to([initial[key] for key in state.model_states])
    if left := _moved(state, initial):
        raise ReloadError(f"the experts of {', '.join(left)} could not be returned to their initial slots")


def _moved(state: Any, initial: dict[str, Int64]) -> list[str]:
    """Return the keys of the models whose placement differs from the initial one."""
    return [
        key
        for key, model_state in state.model_states.items()
        if not np.array_equal(model_state.physical_to_logical_map.cpu().numpy(), initial[key])
    ]
