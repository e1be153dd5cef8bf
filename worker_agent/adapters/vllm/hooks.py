"""Patches for vLLM that replace its balancer with the agent and wrap calls that change weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import methodcaller
from typing import Any

from worker_agent.adapters.compat import Patches, read_known, refuse, refuse_split_models, release_of, require
from worker_agent.adapters.engine_host import log, make_hook, warn_of_ignored_settings, wrap_execute_model
from worker_agent.adapters.vllm.host import VllmHost
from worker_agent.adapters.vllm.step_split import patch_router
from worker_agent.settings import AgentSettings
from worker_agent.step_split import is_requested

KNOWN = read_known("worker_agent.adapters.vllm")
"""Functions that the adapter patches or relies on, by release.

Release 0.33 has no build for CPUs, so it was run with the compiled kernels of 0.32.
"""


_STATE = "vllm.distributed.eplb.eplb_state:EplbState"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RESUME = methodcaller("resume")
_RESTORE = methodcaller("restore")
_RESUME_AFTER_FAILURE = methodcaller("resume_after_failure")
_COUNT_STEPS = methodcaller("set_warming_up", False)
_AROUND: dict[str, dict[str, Callable[[VllmHost], None]]] = {
    # vLLM's second model runner warms up with dummy requests, which must not count as heat.
    "compile_or_warm_up_model": {
        "before": methodcaller("set_warming_up", True),
        "after": _COUNT_STEPS,
        "failed": _COUNT_STEPS,
    },
    "sleep": {
        "before": methodcaller("drain", "the engine is going to sleep"),
        "failed": _RESUME_AFTER_FAILURE,
    },
    "reload_weights": {"before": _RESTORE, "after": _RESUME, "failed": _RESUME},
    # These three calls form an update session, which ends with the last call or with any call that fails.
    "start_weight_update": {"before": _RESTORE, "failed": _RESUME},
    "update_weights": {"failed": _RESUME},
    "finish_weight_update": {"after": _RESUME, "failed": _RESUME},
}
"""Host methods to call around worker methods that warm up the model or change its weights."""
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
    """Check the installed vLLM with ``compat.require``."""
    import vllm

    return require("vLLM", vllm.__version__, KNOWN, PATCHES, allow_unverified=allow_unverified)


def install() -> None:
    """Replace vLLM's balancer with the agent.

    Raises ``UnsupportedEngineError`` if ``check_release`` does, before anything is patched.
    """
    settings = AgentSettings()
    if differences := check_release(settings.allow_unverified_engine):
        log.warning("%s", differences)
    _replace_balancer()
    _watch_loading()
    if is_requested(settings.step_split):
        patch_router()  # must come before _count_passes, whose patch wraps the split
    _count_passes()
    _hook_worker()


def _count_passes() -> None:
    """Count passes at the point where routers map choices to physical experts.

    Every layer maps its choices inside vLLM's opaque operator, so graphs also capture the counting.
    """
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
    """Patch ``EplbState`` so that it creates a host for the target model and calls it after every pass."""
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.parallel_state import get_ep_group

    add_model = EplbState.add_model

    def add_model_and_agent(self: Any, model: Any, model_config: Any, *rest: Any, **keywords: Any) -> None:
        add_model(self, model, model_config, *rest, **keywords)
        self.is_async = False
        runner_type = getattr(model_config, "runner_type", None)
        if runner_type == "draft":
            log.info("the draft model keeps the placement that vLLM gave it")
            return
        model_state = self.model_states[model_config.compute_hash()]
        self.eplb_agent_host = VllmHost(
            model_state, self.parallel_config, get_ep_group(), is_pooling=runner_type == "pooling"
        )

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
            "vLLM called its own balancer to rearrange experts while eplb-agent balances them; elastic expert "
            "parallelism is not supported: unset EPLB_AGENT_SERVICE to use it"
        )

    def start_async_loop(*_: Any, **__: Any) -> None:
        return

    EplbState.add_model = add_model_and_agent
    EplbState.step = step
    EplbState.rearrange = rearrange
    EplbState.start_async_loop = start_async_loop


def _watch_loading() -> None:
    """Patch ``load_model`` to refuse unsupported settings, and to log after loading if the model is not balanced."""
    from vllm.v1.worker.gpu_worker import Worker

    load_model = Worker.load_model

    @wraps(load_model)
    def load_model_watched(self: Any, *arguments: Any, **keywords: Any) -> Any:
        parallel_config = self.vllm_config.parallel_config
        if not parallel_config.enable_eplb:
            return load_model(self, *arguments, **keywords)
        refuse_settings(self.vllm_config)
        result = load_model(self, *arguments, **keywords)
        if self.rank != 0:
            return result
        if _host_of(self) is None:
            log.warning(
                "%s is NOT balanced: this vLLM release does not support EPLB for this model class. Serve it without "
                "--enable-eplb and without EPLB_AGENT_SERVICE, or serve a different model; docs/research/models.md "
                "lists models that can be balanced",
                type(self.model_runner.get_model()).__name__,
            )
        else:
            eplb_config = parallel_config.eplb_config
            defaults = vars(type(eplb_config)())
            defaults.pop("communicator", None)  # vLLM sets this one itself
            warn_of_ignored_settings("vLLM", vars(eplb_config), defaults)
        return result

    Worker.load_model = load_model_watched


def _hook_worker() -> None:
    """Patch the worker's methods that run steps, change weights, sleep or wake up."""
    from vllm.v1.worker.gpu_worker import Worker

    for name, calls in _AROUND.items():
        setattr(Worker, name, _hooked(getattr(Worker, name), make_hook(_host_of, **calls)))
    # The worker calls both model runners through this method, except for dummy runs.
    Worker.execute_model = wrap_execute_model(Worker.execute_model, _host_of)
    Worker.sleep = _hooked(Worker.sleep, _keep_tables)
    Worker.wake_up = _hooked(Worker.wake_up, _wake_up)


def _keep_tables(sleep: Callable[..., Any], worker: Any, *arguments: Any, **keywords: Any) -> Any:
    """Save the tables of models that the agent does not balance, such as a draft model, before ``sleep``.

    vLLM allocates these tables in memory that sleep level 2 discards, and saves only the buffers of modules.
    """
    host = _host_of(worker)
    if host is not None:
        host.keep_other_tables(list(worker.model_runner.eplb_state.model_states.values()))
    return sleep(worker, *arguments, **keywords)


def _wake_up(wake_up: Callable[..., Any], worker: Any, *arguments: Any, **keywords: Any) -> Any:
    """Rewrite all tables and resume balancing after a ``wake_up`` that restores their memory."""
    result = wake_up(worker, *arguments, **keywords)
    tags = keywords.get("tags", arguments[0] if arguments else None)
    host = _host_of(worker)
    if host is not None and (tags is None or "weights" in tags):
        record = worker.model_runner.eplb_state.should_record_tensor
        if record is not None:
            record.fill_(True)
        host.resume()
    return result


def _hooked(call: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs ``hook`` with the original method as its first argument."""

    @wraps(call)
    def hooked_call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return hook(call, self, *arguments, **keywords)

    return hooked_call


def _host_of(worker: Any) -> VllmHost | None:
    return getattr(getattr(worker.model_runner, "eplb_state", None), "eplb_agent_host", None)


def refuse_settings(vllm_config: Any) -> None:
    """Raise ``UnsupportedEngineError`` if a setting of vLLM does not work with the agent."""
    import vllm
    from vllm import envs

    parallel_config = vllm_config.parallel_config
    refuse_split_models(vllm_config)
    refuse(
        [
            (
                bool(getattr(parallel_config, "enable_elastic_ep", False)),
                "elastic expert parallelism (--enable-elastic-ep)",
                "Ranks join and leave, but the agents' votes need a fixed group",
                "Start without --enable-elastic-ep",
            ),
            (
                release_of(vllm.__version__, KNOWN) == "0.23" and bool(envs.VLLM_USE_V2_MODEL_RUNNER),
                "the second model runner of vLLM 0.23 (VLLM_USE_V2_MODEL_RUNNER)",
                "It has not been tested with the agent, and this release does not choose it for MoE models",
                "Unset VLLM_USE_V2_MODEL_RUNNER or use a later vLLM",
            ),
        ]
    )
