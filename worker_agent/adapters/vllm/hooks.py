"""What of vLLM is patched, and the versions in which each of these functions is known."""

from __future__ import annotations

import logging
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
    _drain_around_weight_changes()


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


def _drain_around_weight_changes() -> None:
    """Sleeping, waking and reloading: nothing may be under way, and reloaded weights are in vLLM's first layout."""
    from vllm.v1.worker.gpu_worker import Worker

    sleep, wake_up, reload_weights = Worker.sleep, Worker.wake_up, Worker.reload_weights

    def sleep_drained(self: Any, *arguments: Any, **named: Any) -> Any:
        if (host := _host_of(self)) is not None:
            host.drain("the engine sleeps")
        return sleep(self, *arguments, **named)

    def wake_up_resumed(self: Any, *arguments: Any, **named: Any) -> Any:
        result = wake_up(self, *arguments, **named)
        if (host := _host_of(self)) is not None:
            host.resume()
        return result

    def reload_weights_drained(self: Any, *arguments: Any, **named: Any) -> Any:
        host = _host_of(self)
        if host is not None:
            host.drain("the engine loads other weights")
        result = reload_weights(self, *arguments, **named)
        if host is not None:
            host.restart_from_checkpoint_layout()
        return result

    Worker.sleep = sleep_drained
    Worker.wake_up = wake_up_resumed
    Worker.reload_weights = reload_weights_drained


def _host_of(worker: Any) -> VllmHost | None:
    return getattr(getattr(worker.model_runner, "eplb_state", None), "eplb_agent_host", None)


def _refuse(parallel_config: Any) -> None:
    if getattr(parallel_config, "enable_elastic_ep", False):
        raise UnsupportedEngineError(
            "elastic expert parallelism (--enable-elastic-ep)",
            "Ranks come and go under the agents' votes",
            "Start without it",
        )
