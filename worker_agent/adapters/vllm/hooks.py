"""Patches of vLLM: the agent in place of its balancer, and around calls that change weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import methodcaller
from typing import Any

from worker_agent.adapters.compat import Patches, read_known, refuse, refuse_cut_models, release_of, require
from worker_agent.adapters.engine_host import around, ignored_settings, log, noting_batches
from worker_agent.adapters.vllm.host import VllmHost
from worker_agent.settings import AgentSettings

KNOWN = read_known("worker_agent.adapters.vllm")
"""Functions that are patched here or relied on, by release; of 0.33, which has no build for CPUs, as read."""


_STATE, _WORKER = "vllm.distributed.eplb.eplb_state:EplbState", "vllm.v1.worker.gpu_worker:Worker"
_RESUME = methodcaller("resume")
_RESTORE = methodcaller("restore")
_GO_ON = methodcaller("go_on")
_SERVE = methodcaller("set_warming_up", False)
_AROUND: dict[str, dict[str, Callable[[VllmHost], None]]] = {
    # vLLM's second model runner warms up with dummy requests, which must not count as heat.
    "compile_or_warm_up_model": {
        "before": methodcaller("set_warming_up", True),
        "after": _SERVE,
        "failed": _SERVE,
    },
    "sleep": {"before": methodcaller("drain", "the engine sleeps"), "failed": _GO_ON},
    "reload_weights": {"before": _RESTORE, "after": _RESUME, "failed": _RESUME},
    # A session of updates: it ends by its last call, or by one that fails.
    "start_weight_update": {"before": _RESTORE, "failed": _RESUME},
    "update_weights": {"failed": _RESUME},
    "finish_weight_update": {"after": _RESUME, "failed": _RESUME},
}
"""Host methods to call before and after a worker's warm-up and changes of weights, and if those fail."""
PATCHES: Patches = {
    f"{_STATE}.add_model": 3,
    f"{_STATE}.step": None,
    f"{_STATE}.rearrange": 0,
    f"{_STATE}.start_async_loop": 0,
    f"{_WORKER}.execute_model": 2,
    f"{_WORKER}.load_model": 1,
    f"{_WORKER}.wake_up": 1,
    **{f"{_WORKER}.{name}": 1 for name in _AROUND},
}


def check_release(allow_unverified: bool) -> str | None:
    """Check the vLLM that is installed here as ``require`` does."""
    import vllm

    return require("vLLM", vllm.__version__, KNOWN, PATCHES, allow_unverified=allow_unverified)


def install() -> None:
    """Put the agent in place of vLLM's balancer, all of it or nothing; raises as ``check_release`` does."""
    if differs := check_release(AgentSettings().allow_unverified_engine):
        log.warning("%s", differs)
    _replace_balancer()
    _watch_loading()
    _count_passes()
    _hook_worker()


def _count_passes() -> None:
    """Count passes where routers map choices: in every layer, inside vLLM's opaque operator, captured with it."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    map_choices = BaseRouter._apply_eplb_mapping

    def map_choices_counted(self: Any, topk_ids: Any) -> Any:
        if self.eplb_agent_layer is not None:
            heat, index, layers = self.eplb_agent_layer
            heat.layer_runs(index, layers)
        return map_choices(self, topk_ids)

    BaseRouter.eplb_agent_layer = None
    BaseRouter._apply_eplb_mapping = map_choices_counted


def _replace_balancer() -> None:
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.parallel_state import get_ep_group

    add_model = EplbState.add_model

    def add_model_and_agent(self: Any, model: Any, model_config: Any, *rest: Any, **named: Any) -> None:
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


def _watch_loading() -> None:
    """Refuse settings before a model is loaded, and report afterwards where nothing of it is balanced."""
    from vllm.v1.worker.gpu_worker import Worker

    load_model = Worker.load_model

    @wraps(load_model)
    def load_model_watched(self: Any, *arguments: Any, **named: Any) -> Any:
        parallel_config = self.vllm_config.parallel_config
        if not parallel_config.enable_eplb:
            return load_model(self, *arguments, **named)
        refuse_settings(self.vllm_config)
        loaded = load_model(self, *arguments, **named)
        if self.rank != 0:
            return loaded
        if _host_of(self) is None:
            log.warning(
                "%s is NOT balanced: this vLLM has no EPLB for its class. Serve it without --enable-eplb and without "
                "EPLB_AGENT_SERVICE, or another model; the docs list those that can be balanced (models.md)",
                type(self.model_runner.get_model()).__name__,
            )
        else:
            given = parallel_config.eplb_config
            defaults = vars(type(given)())
            defaults.pop("communicator", None)  # vLLM itself sets it
            ignored_settings("vLLM", vars(given), defaults)
        return loaded

    Worker.load_model = load_model_watched


def _hook_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    for name, asked in _AROUND.items():
        setattr(Worker, name, _hooked(getattr(Worker, name), around(_host_of, **asked)))
    # The worker calls both model runners through this method, but not for dummy runs.
    Worker.execute_model = noting_batches(Worker.execute_model, _host_of)
    Worker.sleep = _hooked(Worker.sleep, _keep_tables)
    Worker.wake_up = _hooked(Worker.wake_up, _wake_up)


def _keep_tables(sleep: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
    """Around ``sleep``: keep the tables of models that the agent does not balance, as a draft model's.

    vLLM allocates them in memory that sleep level 2 discards, and saves only the buffers of modules.
    """
    host = _host_of(worker)
    if host is not None:
        host.keep_other_tables(list(worker.model_runner.eplb_state.model_states.values()))
    return sleep(worker, *arguments, **named)


def _wake_up(wake_up: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
    """Around ``wake_up``: write all tables again once the memory that they are in is back, and balance again."""
    result = wake_up(worker, *arguments, **named)
    tags = named.get("tags", arguments[0] if arguments else None)
    host = _host_of(worker)
    if host is not None and (tags is None or "weights" in tags):
        record = worker.model_runner.eplb_state.should_record_tensor
        if record is not None:
            record.fill_(True)
        host.resume()
    return result


def _hooked(call: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def calling(self: Any, *arguments: Any, **named: Any) -> Any:
        return hook(call, self, *arguments, **named)

    return calling


def _host_of(worker: Any) -> VllmHost | None:
    return getattr(getattr(worker.model_runner, "eplb_state", None), "eplb_agent_host", None)


def refuse_settings(vllm_config: Any) -> None:
    """Raise ``UnsupportedEngineError`` where a setting does not go with the agent."""
    import vllm
    from vllm import envs

    parallel_config = vllm_config.parallel_config
    refuse_cut_models(vllm_config)
    refuse(
        [
            (
                bool(getattr(parallel_config, "enable_elastic_ep", False)),
                "elastic expert parallelism (--enable-elastic-ep)",
                "Ranks come and go under the agents' votes",
                "Start without it",
            ),
            (
                release_of(vllm.__version__, KNOWN) == "0.23" and bool(envs.VLLM_USE_V2_MODEL_RUNNER),
                "the second model runner of vLLM 0.23 (VLLM_USE_V2_MODEL_RUNNER)",
                "It has not been run with the agent, and is not what this release chooses for MoE models",
                "Unset VLLM_USE_V2_MODEL_RUNNER or use a later vLLM",
            ),
        ]
    )
