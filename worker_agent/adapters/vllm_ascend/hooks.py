"""Patches of vLLM-Ascend: the agent in place of its balancer, and around dispatch, dummy runs and loading."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from worker_agent.adapters.compat import Patches, require
from worker_agent.adapters.engine_host import noting_batches
from worker_agent.adapters.vllm_ascend.host import AscendHost, LayerFinder, NoManager, NoProcess
from worker_agent.adapters.vllm_ascend.refusals import KNOWN, refuse_misread_lists

_UPDATOR, _WORKER = "vllm_ascend.eplb.eplb_updator:EplbUpdator", "vllm_ascend.worker.worker:NPUWorker"
PATCHES: Patches = {
    **dict.fromkeys(
        f"{_UPDATOR}.{name}"
        for name in ("__init__", "forward_before", "forward_end", "set_adaptor", "shutdown", "warm_up_eplb")
    ),
    "vllm_ascend.eplb.adaptor.vllm_adaptor:VllmEplbAdaptor.__init__": None,
    "vllm_ascend.eplb.core.eplb_worker:EplbProcess.__init__": 2,
    "vllm_ascend.eplb.core.eplb_worker:EplbProcess._launch_process": None,
    "vllm_ascend.ops.fused_moe.moe_comm_method:MoECommMethod.fused_experts": None,
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner._dummy_run": 1,
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner.execute_model": 2,
    f"{_WORKER}.start_weight_update": 1,
    f"{_WORKER}.update_weights": 1,
}


def check_release(allow_unverified: bool) -> str | None:  # noqa: ARG001
    """Check the vLLM-Ascend that is installed here as ``require`` does; nothing unverified is let through."""
    from vllm_ascend._version import __version__

    return require("vLLM-Ascend", __version__, KNOWN, PATCHES)


def install() -> None:
    """Put the agent in place of vLLM-Ascend's balancer, all of it or nothing; raises as ``check_release`` does."""
    check_release(allow_unverified=False)
    import vllm_ascend.worker.model_runner_v1 as runner
    from vllm_ascend.worker.worker import NPUWorker

    _replace_balancer(runner)
    _mark_dummy_runs(runner.NPUModelRunner)
    runner.NPUModelRunner.execute_model = noting_batches(runner.NPUModelRunner.execute_model, _balancer_of)
    _count_sources()
    # Release 0.18 has none of the two; that 0.23 has both was checked above.
    updates = [name for name in ("start_weight_update", "update_weights") if hasattr(NPUWorker, name)]
    _refuse_other_weights(NPUWorker, *updates)
    _refuse_other_weights(runner.NPUModelRunner, "reload_weights")


def _replace_balancer(runner: ModuleType) -> None:
    """Replace the balancer's parts that the runner makes: no subprocess, no staging, the agent for the updator."""
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
    """Count choices before dispatch, in every communication method but the fused one, which is refused."""
    from vllm_ascend.ops.fused_moe import moe_mlp
    from vllm_ascend.ops.fused_moe.moe_comm_method import AllGatherCommImpl, MC2CommImpl, MoECommMethod

    fused_experts = MoECommMethod.fused_experts

    def fused_experts_counted(self: Any, fused_experts_input: Any) -> Any:
        balancer = AscendHost.of_this_process
        if balancer is not None and balancer.heat is not None:
            weights = fused_experts_input.weights
            refuse_misread_lists(
                weights.w1_scale,
                weights.w2_scale,
                mc2=isinstance(self, MC2CommImpl),
                kernel_for_lists=moe_mlp._custom_gmm_swiglu_enabled(self.use_fusion_ops, dynamic_eplb=True),
            )
            balancer.heat.count_choices(fused_experts_input, isinstance(self, AllGatherCommImpl))
        return fused_experts(self, fused_experts_input)

    MoECommMethod.fused_experts = fused_experts_counted


def _balancer_of(runner: Any) -> AscendHost | None:
    balancer = getattr(runner, "eplb_updator", None)
    return balancer if isinstance(balancer, AscendHost) else None


def _mark_dummy_runs(runner: Any) -> None:
    """Forward passes of dummies count as passes, not as tokens of this rank."""
    dummy_run = runner._dummy_run

    def dummy_run_marked(self: Any, *arguments: Any, **named: Any) -> Any:
        balancer = _balancer_of(self)
        if balancer is None:
            return dummy_run(self, *arguments, **named)
        with balancer.dummies():
            return dummy_run(self, *arguments, **named)

    runner._dummy_run = dummy_run_marked


def _refuse_other_weights(owner: Any, *names: str) -> None:
    """Calls that load weights raise while experts are balanced: the host puts them into new tensors."""

    def refusing(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
            if AscendHost.of_this_process is not None:
                raise RuntimeError(
                    f"{change.__name__}: vLLM-Ascend loads weights into new tensors, while eplb-agent moves experts "
                    "between the ones that it started with; start the engine again, or unset EPLB_AGENT_SERVICE to "
                    "load while serving"
                )
            return change(self, *arguments, **named)

        return refuse

    for name in names:
        setattr(owner, name, refusing(getattr(owner, name)))
