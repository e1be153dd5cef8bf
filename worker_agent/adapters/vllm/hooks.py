"""What of vLLM is patched, and the versions in which each of these functions is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from worker_agent.adapters import compat
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm.host import VllmHost
from worker_agent.adapters.vllm.known import KNOWN
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")


def install() -> None:
    """Check this vLLM, then put the agent in place of its balancer: all of it or nothing.

    Raises
    ------
    UnsupportedEngineError
        Where ``known`` does not list this release, or a function in it is not the known one.
    """
    import vllm

    allowed = AgentSettings().allow_unverified_engine
    compat.require("vLLM", vllm.__version__, KNOWN, allow_unverified=allowed)
    _replace_balancer()
    _guard_weights()


def _replace_balancer() -> None:
    from vllm.distributed.eplb.eplb_state import EplbState

    add_model = EplbState.add_model

    def add_model_and_agent(self: Any, model: Any, model_config: Any, *rest: Any, **named: Any) -> None:
        _refuse(self.parallel_config)
        add_model(self, model, model_config, *rest, **named)
        self.is_async = False
        if getattr(model_config, "runner_type", None) == "draft":
            _log.info("the draft model keeps the placement that vLLM gave it")
            return
        self.eplb_agent_host = VllmHost(self, self.model_states[model_config.compute_hash()])

    def step(self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:  # noqa: ARG001
        if is_profile:
            return
        host = getattr(self, "eplb_agent_host", None)
        if host is not None:
            host.step(is_dummy)
        for model_state in self.model_states.values():
            model_state.expert_load_pass.zero_()
        if self.should_record_tensor is not None:
            self.should_record_tensor.fill_(True)

    def rearrange(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "vLLM asked its own balancer to rearrange experts while eplb-agent balances them; elastic expert "
            "parallelism is not supported: unset EPLB_AGENT_SERVICE to use it"
        )

    def start_async_loop(*_: Any, **__: Any) -> None:
        return

    EplbState.add_model = add_model_and_agent
    EplbState.step = step
    EplbState.rearrange = rearrange
    EplbState.start_async_loop = start_async_loop


def _guard_weights() -> None:
    """Nothing is under way while the engine sleeps; other weights are refused: vLLM loads by its first layout."""
    from vllm.v1.worker.gpu_worker import Worker

    sleep, wake_up = Worker.sleep, Worker.wake_up

    def sleep_drained(self: Any, *arguments: Any, **named: Any) -> Any:
        if (host := _host_of(self)) is not None:
            host.drain("the engine sleeps")
        return sleep(self, *arguments, **named)

    def wake_up_resumed(self: Any, *arguments: Any, **named: Any) -> Any:
        result = wake_up(self, *arguments, **named)
        if (host := _host_of(self)) is not None:
            host.resume()
        return result

    def refusing(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
            if _host_of(self) is not None:
                raise RuntimeError(
                    f"{change.__name__}: vLLM loads weights for the placement that it started with, and eplb-agent has "
                    "moved experts since; start the engine again, or unset EPLB_AGENT_SERVICE to load while serving"
                )
            return change(self, *arguments, **named)

        return refuse

    Worker.sleep = sleep_drained
    Worker.wake_up = wake_up_resumed
    Worker.reload_weights = refusing(Worker.reload_weights)
    Worker.start_weight_update = refusing(Worker.start_weight_update)
    Worker.update_weights = refusing(Worker.update_weights)


def _host_of(worker: Any) -> VllmHost | None:
    return getattr(getattr(worker.model_runner, "eplb_state", None), "eplb_agent_host", None)


def _refuse(parallel_config: Any) -> None:
    if getattr(parallel_config, "enable_elastic_ep", False):
        raise UnsupportedEngineError(
            "elastic expert parallelism (--enable-elastic-ep)",
            "Ranks come and go under the agents' votes",
            "Start without it",
        )
