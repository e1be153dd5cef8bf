"""Hooks on SGLang, through its own registry of hooks."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, TypeAlias

from worker_agent.adapters.compat import Patches, UnsupportedEngineError, read_known, require
from worker_agent.adapters.engine_host import around, ignored_settings, log
from worker_agent.adapters.sglang.host import SglangHost
from worker_agent.adapters.sglang.options import OF_ITS_MANAGER, SglangOptions
from worker_agent.settings import AgentSettings

KNOWN = read_known("worker_agent.adapters.sglang")
"""Functions that are hooked here or relied on, by release."""

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_OCCUPATION = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_Call: TypeAlias = Callable[..., Any]


def check_release(allow_unverified: bool) -> str | None:
    """Check the SGLang that is installed here as ``require`` does."""
    from sglang.version import __version__

    return require("SGLang", __version__, KNOWN, PATCHES, allow_unverified=allow_unverified)


def install() -> None:
    """Register the hooks, which SGLang applies when all plugins have been called; raises as ``check_release`` does."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if differs := check_release(AgentSettings().allow_unverified_engine):
        log.warning("%s", differs)
    for target, hook in AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def _host_of(runner: Any) -> SglangHost | None:
    """Return the host of this runner's model; ``None`` with EPLB off, and for draft models."""
    manager = getattr(runner, "eplb_manager", None)
    return manager if isinstance(manager, SglangHost) else None


def _make_host(original: _Call, runner: Any) -> None:
    """Around ``maybe_init_eplb_manager``: with EPLB on, ours instead of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_exec

    if not get_exec().moe.enable_eplb or runner.is_draft_worker:
        original(runner)
        return
    # SGLang logs a hook that it cannot apply, and goes on without it.
    if missing := {*AROUND, *AFTER} - HookRegistry._patched:
        raise UnsupportedEngineError(
            f"SGLang did not apply the hooks on {', '.join(sorted(missing))}",
            "A model would be balanced by half",
            "See its log for 'Failed to apply hooks'",
        )
    options = SglangOptions.of_this_process()
    options.check(allow_unverified=AgentSettings().allow_unverified_engine)
    runner.eplb_manager = SglangHost(runner, options)


def _start_host(_: Any, runner: Any) -> None:
    """After ``initialize``: the model is loaded, memory for its KV cache not yet taken."""
    host = _host_of(runner)
    if host is None:
        return
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_parallel().moe_ep_rank == 0:
        moe = get_exec().moe
        ignored_settings("SGLang", {name: getattr(moe, name) for name in OF_ITS_MANAGER}, OF_ITS_MANAGER)
    host.start(
        get_global_expert_location_metadata(),
        get_global_expert_distribution_recorder(),
        get_parallel().moe_ep_rank,
        get_parallel().tp_group.cpu_group,
    )


def _count_pass(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """After ``_forward_raw``, within ``forward``, on its stream: the model has been queued."""
    host = _host_of(runner)
    if host is not None:
        host.count_pass()


def _step_host(_: Any, runner: Any, forward_batch: Any, *__: Any, **___: Any) -> None:
    """After ``forward``, on its stream."""
    host = _host_of(runner)
    if host is not None:
        host.step(forward_batch)


def _load_weights(original: _Call, updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around every call that loads weights: nothing is under way meanwhile."""
    host = _host_loading(updater)
    if host is None:
        return original(updater, *arguments, **named)
    with host.drained("SGLang loads weights"):
        return original(updater, *arguments, **named)


def _host_loading(updater: Any) -> SglangHost | None:
    return _host_of(updater.get_model_runner())


_DRAIN, _RESUME = methodcaller("drain", "SGLang loads weights"), methodcaller("resume")
_begin_weight_update = around(_host_loading, before=_DRAIN, failed=_RESUME)
"""Around the first call of a session of updates."""
_end_weight_update = around(_host_loading, after=_RESUME, failed=_RESUME)
"""Around its last call."""


def _release_memory(original: _Call, manager: Any, *arguments: Any, **named: Any) -> Any:
    """Around ``release_memory_occupation``: the engine sleeps."""
    host = _host_of(manager.tp_worker.model_runner)
    if host is not None:
        host.drain("the engine releases its memory")
    try:
        return original(manager, *arguments, **named)
    except BaseException:
        if host is not None and not manager.offload_tags:
            host.resume()
        raise


def _resume_memory(original: _Call, manager: Any, *arguments: Any, **named: Any) -> Any:
    """Around ``resume_memory_occupation``: balanced again once all that it released is back."""
    result = original(manager, *arguments, **named)
    host = _host_of(manager.tp_worker.model_runner)
    if host is not None and not manager.offload_tags:
        host.resume()
    return result


AROUND = {
    f"{_RUNNER}.maybe_init_eplb_manager": _make_host,
    f"{_UPDATER}.update_weights_from_disk": _load_weights,
    f"{_UPDATER}.load_weights_from_distributed": _load_weights,
    f"{_UPDATER}.update_weights_from_tensor": _load_weights,
    f"{_UPDATER}.update_weights_from_ipc": _load_weights,
    f"{_UPDATER}.begin_weight_update": _begin_weight_update,
    f"{_UPDATER}.end_weight_update": _end_weight_update,
    f"{_OCCUPATION}.release_memory_occupation": _release_memory,
    f"{_OCCUPATION}.resume_memory_occupation": _resume_memory,
}
AFTER = {
    f"{_RUNNER}.initialize": _start_host,
    f"{_RUNNER}._forward_raw": _count_pass,
    f"{_RUNNER}.forward": _step_host,
}


def _patched(target: str) -> str:
    """Return the name of a hook's target in ``known.json``."""
    path, _, function = target.rpartition(".")
    module, _, owner = path.rpartition(".")
    return f"{module}:{owner}.{function}"


PATCHES: Patches = {
    **{_patched(target): 1 for target in (*AROUND, *AFTER)},
    _patched(f"{_RUNNER}.maybe_init_eplb_manager"): None,
    _patched(f"{_RUNNER}.forward"): 2,
}
