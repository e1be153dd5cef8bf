"""Patches of vLLM: the agent in place of its balancer, and around calls that change weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

from worker_agent.adapters.compat import UnsupportedEngineError, read_known, release_of, require
from worker_agent.adapters.engine_host import log
from worker_agent.adapters.vllm.host import VllmHost
from worker_agent.settings import AgentSettings

KNOWN = read_known("worker_agent.adapters.vllm")
"""Functions that are patched here or relied on, by release; of 0.33, which has no build for CPUs, as read."""


def install() -> None:
    """Check this vLLM, then put the agent in place of its balancer: all of it or nothing.

    Raises ``UnsupportedEngineError`` where ``known.json`` does not list this release, or a function is another one.
    """
    import vllm

    allowed = AgentSettings().allow_unverified_engine
    require("vLLM", vllm.__version__, KNOWN, allow_unverified=allowed)
    _replace_balancer()
    _guard_weights()


def _replace_balancer() -> None:
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.parallel_state import get_ep_group

    add_model = EplbState.add_model

    def add_model_and_agent(self: Any, model: Any, model_config: Any, *rest: Any, **named: Any) -> None:
        refuse_settings(self.parallel_config)
        add_model(self, model, model_config, *rest, **named)
        self.is_async = False
        if getattr(model_config, "runner_type", None) == "draft":
            log.info("the draft model keeps the placement that vLLM gave it")
            return
        model_state = self.model_states[model_config.compute_hash()]
        self.eplb_agent_host = VllmHost(model_state, self.parallel_config, get_ep_group())

    def step(self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:  # noqa: ARG001
        host = getattr(self, "eplb_agent_host", None)
        if host is not None and is_profile:
            host.confirm_dispatch()
        elif host is not None:
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
    """Drain before the engine sleeps, and restore the first placement before it loads weights; resume afterwards."""
    from vllm.v1.worker.gpu_worker import Worker

    Worker.sleep = _between(
        Worker.sleep, before=lambda host: host.drain("the engine sleeps"), failed=VllmHost.resume
    )
    Worker.wake_up = _between(Worker.wake_up, after=VllmHost.resume)
    Worker.reload_weights = _between(
        Worker.reload_weights, before=VllmHost.restore, after=VllmHost.resume, failed=VllmHost.resume
    )
    # A session of updates: it ends by its last call, or by one that fails.
    Worker.start_weight_update = _between(
        Worker.start_weight_update, before=VllmHost.restore, failed=VllmHost.resume
    )
    Worker.update_weights = _between(Worker.update_weights, failed=VllmHost.resume)
    Worker.finish_weight_update = _between(
        Worker.finish_weight_update, after=VllmHost.resume, failed=VllmHost.resume
    )


_Act: TypeAlias = Callable[[VllmHost], None]


def _between(
    call: Callable[..., Any],
    before: _Act | None = None,
    after: _Act | None = None,
    failed: _Act | None = None,
) -> Callable[..., Any]:
    """Wrap a worker's ``call`` in acts of its host: before it, after it and where it raises."""

    @wraps(call)
    def calling(self: Any, *arguments: Any, **named: Any) -> Any:
        host = _host_of(self)
        try:
            if host is not None and before is not None:
                before(host)
            result = call(self, *arguments, **named)
        except BaseException:
            if host is not None and failed is not None:
                failed(host)
            raise
        if host is not None and after is not None:
            after(host)
        return result

    return calling


def _host_of(worker: Any) -> VllmHost | None:
    return getattr(getattr(worker.model_runner, "eplb_state", None), "eplb_agent_host", None)


def refuse_settings(parallel_config: Any) -> None:
    """Raise ``UnsupportedEngineError`` where a setting does not go with the agent."""
    if getattr(parallel_config, "enable_elastic_ep", False):
        raise UnsupportedEngineError(
            "elastic expert parallelism (--enable-elastic-ep)",
            "Ranks come and go under the agents' votes",
            "Start without it",
        )
    import vllm
    from vllm import envs

    if release_of(vllm.__version__, KNOWN) == "0.23" and envs.VLLM_USE_V2_MODEL_RUNNER:
        raise UnsupportedEngineError(
            "the second model runner of vLLM 0.23 (VLLM_USE_V2_MODEL_RUNNER)",
            "It has not been run with the agent, and is not what this release chooses for MoE models",
            "Unset VLLM_USE_V2_MODEL_RUNNER or use a later vLLM",
        )
