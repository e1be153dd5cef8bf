"""What of SGLang is hooked, through its own registry of hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from worker_agent.adapters import compat
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.sglang.balancer import SglangBalancer
from worker_agent.adapters.sglang.known import KNOWN
from worker_agent.adapters.sglang.options import SglangOptions
from worker_agent.settings import AgentSettings

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_OCCUPATION = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_Call: TypeAlias = Callable[..., Any]


def install() -> None:
    """Check this SGLang, then register the hooks, which SGLang applies when all plugins have been called.

    Raises
    ------
    UnsupportedEngineError
        Where ``known`` does not list this release, or a function in it is not the known one.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__

    allowed = AgentSettings().allow_unverified_engine
    compat.require("SGLang", __version__, KNOWN, allow_unverified=allowed)
    for target, hook in AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def balancer_of(runner: Any) -> SglangBalancer | None:
    """What balances the model of this runner; ``None`` with EPLB off, and for draft models."""
    manager = getattr(runner, "eplb_manager", None)
    return manager if isinstance(manager, SglangBalancer) else None


def make_balancer(original: _Call, runner: Any) -> None:
    """Around ``maybe_init_eplb_manager``: with EPLB on, ours instead of SGLang's."""
    from sglang.srt.runtime_context import get_exec

    if not get_exec().moe.enable_eplb or runner.is_draft_worker:
        original(runner)
        return
    _require_all_hooks()
    options = SglangOptions.of_this_process()
    options.check(allow_unverified=AgentSettings().allow_unverified_engine)
    runner.eplb_manager = SglangBalancer(runner, options)


def start_balancer(_: Any, runner: Any) -> None:
    """After ``initialize``: the model is loaded, memory for its KV cache not yet taken."""
    balancer = balancer_of(runner)
    if balancer is None:
        return
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_parallel

    balancer.start(
        get_global_expert_location_metadata(),
        get_global_expert_distribution_recorder(),
        get_parallel().moe_ep_rank,
        get_parallel().tp_group.cpu_group,
    )


def step_balancer(_: Any, runner: Any, forward_batch: Any, *__: Any, **___: Any) -> None:
    """After ``forward``, on its stream."""
    balancer = balancer_of(runner)
    if balancer is not None:
        balancer.step(forward_batch)


def load_weights(original: _Call, updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around every call that loads weights: nothing is under way meanwhile."""
    balancer = balancer_of(updater.get_model_runner())
    if balancer is None:
        return original(updater, *arguments, **named)
    with balancer.paused("SGLang loads weights"):
        return original(updater, *arguments, **named)


def begin_weight_update(original: _Call, updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around the first call of a session of updates."""
    balancer = balancer_of(updater.get_model_runner())
    if balancer is not None:
        balancer.pause("SGLang loads weights")
    try:
        return original(updater, *arguments, **named)
    except BaseException:
        if balancer is not None:
            balancer.go_on()
        raise


def end_weight_update(original: _Call, updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around its last call."""
    balancer = balancer_of(updater.get_model_runner())
    try:
        return original(updater, *arguments, **named)
    finally:
        if balancer is not None:
            balancer.go_on()


def release_memory(original: _Call, manager: Any, *arguments: Any, **named: Any) -> Any:
    """Around ``release_memory_occupation``: the engine sleeps."""
    balancer = balancer_of(manager.tp_worker.model_runner)
    if balancer is not None:
        balancer.pause("the engine releases its memory")
    try:
        return original(manager, *arguments, **named)
    except BaseException:
        if balancer is not None and not manager.offload_tags:
            balancer.go_on()
        raise


def resume_memory(original: _Call, manager: Any, *arguments: Any, **named: Any) -> Any:
    """Around ``resume_memory_occupation``: balanced again once all that it released is back."""
    result = original(manager, *arguments, **named)
    balancer = balancer_of(manager.tp_worker.model_runner)
    if balancer is not None and not manager.offload_tags:
        balancer.go_on()
    return result


AROUND = {
    f"{_RUNNER}.maybe_init_eplb_manager": make_balancer,
    f"{_UPDATER}.update_weights_from_disk": load_weights,
    f"{_UPDATER}.load_weights_from_distributed": load_weights,
    f"{_UPDATER}.update_weights_from_tensor": load_weights,
    f"{_UPDATER}.update_weights_from_ipc": load_weights,
    f"{_UPDATER}.begin_weight_update": begin_weight_update,
    f"{_UPDATER}.end_weight_update": end_weight_update,
    f"{_OCCUPATION}.release_memory_occupation": release_memory,
    f"{_OCCUPATION}.resume_memory_occupation": resume_memory,
}
AFTER = {f"{_RUNNER}.initialize": start_balancer, f"{_RUNNER}.forward": step_balancer}


def _require_all_hooks() -> None:
    """SGLang logs a hook that it cannot apply, and goes on without it."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if missing := {*AROUND, *AFTER} - HookRegistry._patched:
        raise UnsupportedEngineError(
            f"SGLang did not apply the hooks on {', '.join(sorted(missing))}",
            "A model would be balanced by half",
            "See its log for 'Failed to apply hooks'",
        )
