"""Hooks on SGLang, registered with its own hook registry."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, TypeAlias

from worker_agent.adapters.compat import Patches, UnsupportedEngineError, nearest, read_known, require
from worker_agent.adapters.engine_host import log, make_hook, warn_of_ignored_settings
from worker_agent.adapters.sglang.host import SglangHost
from worker_agent.adapters.sglang.older_releases import refuse_runner, refuse_unmapped_model
from worker_agent.adapters.sglang.options import MANAGER_DEFAULTS, SglangOptions
from worker_agent.adapters.sglang.step_split import register_hooks
from worker_agent.settings import AgentSettings

KNOWN = read_known("worker_agent.adapters.sglang")
"""Functions that the adapter hooks or relies on, by release."""

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_OCCUPATION = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_Call: TypeAlias = Callable[..., Any]


def check_release(allow_unverified: bool) -> str | None:
    """Check the installed SGLang with ``compat.require``."""
    from sglang.version import __version__

    return require("SGLang", __version__, KNOWN, PATCHES, allow_unverified=allow_unverified)


def install() -> None:
    """Register the hooks. SGLang applies them after it has called all plugins.

    Raises ``UnsupportedEngineError`` if ``check_release`` does.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    settings = AgentSettings()
    if differences := check_release(settings.allow_unverified_engine):
        log.warning("%s", differences)
    for target, hook in AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)
    register_hooks(settings.step_split)


def _host_of(runner: Any) -> SglangHost | None:
    """Return the host of a runner's model, or ``None`` if it is a draft model or EPLB is off."""
    manager = getattr(runner, "eplb_manager", None)
    return manager if isinstance(manager, SglangHost) else None


def _make_host(original: _Call, runner: Any) -> None:
    """Replace ``maybe_init_eplb_manager``: if EPLB is on, create a host instead of SGLang's manager."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_exec

    if not get_exec().moe.enable_eplb or runner.is_draft_worker:
        original(runner)
        return
    # If SGLang cannot apply a hook, it only logs the failure.
    if missing := {*AROUND, *AFTER} - HookRegistry._patched:
        raise UnsupportedEngineError(
            f"SGLang did not apply the agent's hooks to {', '.join(sorted(missing))}",
            "With only some of the hooks, the agent would miss changes that SGLang makes",
            "See SGLang's log for 'Failed to apply hooks'",
        )
    options = SglangOptions.of_this_process(_release())
    refuse_runner(_release(), runner, options.all_to_all)
    options.check(allow_unverified=AgentSettings().allow_unverified_engine)
    runner.eplb_manager = SglangHost(runner, options)


def _release() -> str:
    """Return the known release that the installed SGLang belongs to, or is compared with."""
    from sglang.version import __version__

    return nearest(__version__, KNOWN)


def _start_host(_: Any, runner: Any) -> None:
    """Start the host after ``initialize``, when the model is loaded but the KV cache is not allocated yet."""
    host = _host_of(runner)
    if host is None:
        return
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_exec, get_parallel

    refuse_unmapped_model(_release(), runner.model)
    if get_parallel().moe_ep_rank == 0:
        moe = get_exec().moe
        settings = {name: getattr(moe, name) for name in MANAGER_DEFAULTS}
        warn_of_ignored_settings("SGLang", settings, MANAGER_DEFAULTS)
    host.start(
        get_global_expert_location_metadata(),
        get_global_expert_distribution_recorder(),
        get_parallel().moe_ep_rank,
        get_parallel().tp_group.cpu_group,
    )


def _count_pass(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Count the pass after ``_forward_raw``, which has enqueued the model's work on the same stream as ``forward``."""
    host = _host_of(runner)
    if host is not None:
        host.count_pass()


def _step_host(_: Any, runner: Any, forward_batch: Any, *__: Any, **___: Any) -> None:
    """Record the step after ``forward``, on its stream."""
    host = _host_of(runner)
    if host is not None:
        host.step(forward_batch)


def _load_weights(original: _Call, updater: Any, *arguments: Any, **keywords: Any) -> Any:
    """Drain the agent before a call that loads weights, and resume afterwards."""
    host = _host_loading(updater)
    if host is None:
        return original(updater, *arguments, **keywords)
    with host.drained("SGLang is loading weights"):
        return original(updater, *arguments, **keywords)


def _host_loading(updater: Any) -> SglangHost | None:
    """Return the host of the model whose weights an updater loads."""
    return _host_of(updater.get_model_runner())


_DRAIN = methodcaller("drain", "SGLang is loading weights")
_RESUME = methodcaller("resume")
_begin_weight_update = make_hook(_host_loading, before=_DRAIN, failed=_RESUME)
"""Hook on the call that starts a weight-update session."""
_end_weight_update = make_hook(_host_loading, after=_RESUME, failed=_RESUME)
"""Hook on the call that ends the session."""


def _release_memory(original: _Call, manager: Any, *arguments: Any, **keywords: Any) -> Any:
    """Drain the agent before ``release_memory_occupation``; resume if it fails without releasing any memory."""
    host = _host_of(manager.tp_worker.model_runner)
    if host is not None:
        host.drain("the engine is releasing its memory")
    try:
        return original(manager, *arguments, **keywords)
    except BaseException:
        if host is not None and not manager.offload_tags:
            host.resume()
        raise


def _resume_memory(original: _Call, manager: Any, *arguments: Any, **keywords: Any) -> Any:
    """Resume balancing after ``resume_memory_occupation`` has restored all of the memory."""
    result = original(manager, *arguments, **keywords)
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
"""Hooks that wrap a function and call the original, by target."""
AFTER = {
    f"{_RUNNER}.initialize": _start_host,
    f"{_RUNNER}._forward_raw": _count_pass,
    f"{_RUNNER}.forward": _step_host,
}
"""Hooks that run after a function, by target."""


def _known_target(target: str) -> str:
    """Return a hook's target in the notation of ``known.json``.

    Examples
    --------
    >>> _known_target("sglang.runner.ModelRunner.forward")
    'sglang.runner:ModelRunner.forward'
    """
    path, _, function = target.rpartition(".")
    module, _, owner = path.rpartition(".")
    return f"{module}:{owner}.{function}"


PATCHES: Patches = {
    **{_known_target(target): 1 for target in (*AROUND, *AFTER)},
    _known_target(f"{_RUNNER}.maybe_init_eplb_manager"): None,
    _known_target(f"{_RUNNER}.forward"): 2,
}
