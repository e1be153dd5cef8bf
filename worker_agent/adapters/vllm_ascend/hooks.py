"""Patches for vLLM-Ascend that replace its balancer with the agent and wrap dispatch, dummy runs and loading."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from worker_agent.adapters.compat import Patches, require
from worker_agent.adapters.engine_host import wrap_execute_model
from worker_agent.adapters.vllm_ascend.host import AscendHost, LayerFinder, NoManager, NoProcess
from worker_agent.adapters.vllm_ascend.refusals import KNOWN, refuse_lists, refuse_second_runner

_UPDATOR = "vllm_ascend.eplb.eplb_updator:EplbUpdator"
_WORKER = "vllm_ascend.worker.worker:NPUWorker"
PATCHES: Patches = {
    **dict.fromkeys(
        f"{_UPDATOR}.{name}"
        for name in ("__init__", "forward_before", "forward_end", "set_adaptor", "shutdown", "warm_up_eplb")
    ),
    "vllm_ascend.eplb.adaptor.vllm_adaptor:VllmEplbAdaptor.__init__": None,
    "vllm_ascend.eplb.core.eplb_worker:EplbProcess.__init__": 2,
    "vllm_ascend.eplb.core.eplb_worker:EplbProcess._launch_process": None,
    "vllm_ascend.ops.fused_moe.moe_comm_method:MoECommMethod.fused_experts": 2,
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner._dummy_run": 1,
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner.execute_model": 2,
    f"{_WORKER}.start_weight_update": 1,
    f"{_WORKER}.update_weights": 1,
}


def check_release(allow_unverified: bool) -> str | None:  # noqa: ARG001
    """Check the installed vLLM-Ascend with ``compat.require``, but never accept an unverified release."""
    from vllm_ascend._version import __version__

    return require("vLLM-Ascend", __version__, KNOWN, PATCHES)


def install() -> None:
    """Replace vLLM-Ascend's balancer with the agent.

    Raises ``UnsupportedEngineError``, before anything is patched, if ``check_release`` does or if the second model
    runner is on.
    """
    check_release(allow_unverified=False)
    refuse_second_runner()
    import vllm_ascend.worker.model_runner_v1 as runner
    from vllm_ascend.worker.worker import NPUWorker

    _replace_balancer(runner)
    _mark_dummy_runs(runner.NPUModelRunner)
    runner.NPUModelRunner.execute_model = wrap_execute_model(
        runner.NPUModelRunner.execute_model, _balancer_of
    )
    _count_sources()
    _refuse_other_weights(NPUWorker, "start_weight_update", "update_weights")
    _refuse_other_weights(runner.NPUModelRunner, "reload_weights")


def _replace_balancer(runner: ModuleType) -> None:
    """Replace the classes from which the model runner builds its balancer.

    The agent replaces the updater, and the subprocess and its shared memory are no longer created. Raises
    ``AttributeError`` before any replacement if a class is missing.
    """
    replacements: dict[str, Any] = {
        "Manager": NoManager,
        "EplbProcess": NoProcess,
        "EplbUpdator": AscendHost,
        "VllmEplbAdaptor": LayerFinder,
    }
    for name in replacements:
        getattr(runner, name)
    for name, replacement in replacements.items():
        setattr(runner, name, replacement)


def _count_sources() -> None:
    """Count choices before dispatch, in every communication method except the fused one, which is refused."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import AllGatherCommImpl, MoECommMethod

    fused_experts = MoECommMethod.fused_experts

    def fused_experts_counted(self: Any, fused_experts_input: Any, **keywords: Any) -> Any:
        balancer = AscendHost.of_this_process
        if balancer is not None and balancer.heat is not None:
            refuse_lists(self, fused_experts_input, **keywords)
            balancer.heat.count_choices(fused_experts_input, isinstance(self, AllGatherCommImpl))
        return fused_experts(self, fused_experts_input, **keywords)

    MoECommMethod.fused_experts = fused_experts_counted


def _balancer_of(runner: Any) -> AscendHost | None:
    balancer = getattr(runner, "eplb_updator", None)
    return balancer if isinstance(balancer, AscendHost) else None


def _mark_dummy_runs(runner: Any) -> None:
    """Patch ``_dummy_run`` so that its passes are recorded as having no tokens on this rank."""
    dummy_run = runner._dummy_run

    def dummy_run_marked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        balancer = _balancer_of(self)
        if balancer is None:
            return dummy_run(self, *arguments, **keywords)
        with balancer.dummies():
            return dummy_run(self, *arguments, **keywords)

    runner._dummy_run = dummy_run_marked


def _refuse_other_weights(owner: Any, *names: str) -> None:
    """Make methods that load weights raise while experts are balanced, because they replace the weight tensors.

    Parameters
    ----------
    owner
        Class to patch.
    *names
        Names of its methods.
    """

    def refusing(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def refuse(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if AscendHost.of_this_process is not None:
                raise RuntimeError(
                    f"{change.__name__}: vLLM-Ascend loads weights into new tensors, while eplb-agent moves experts "
                    "between the original ones; restart the engine, or unset EPLB_AGENT_SERVICE to load weights while "
                    "serving"
                )
            return change(self, *arguments, **keywords)

        return refuse

    for name in names:
        setattr(owner, name, refusing(getattr(owner, name)))
