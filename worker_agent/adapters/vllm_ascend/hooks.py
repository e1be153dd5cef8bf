"""What of vLLM-Ascend is patched, and the versions in which each of these functions is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from worker_agent.adapters import compat
from worker_agent.adapters.vllm_ascend.balancer import AscendBalancer, LayerFinder, NoManager, NoProcess
from worker_agent.adapters.vllm_ascend.known import KNOWN
from worker_agent.adapters.vllm_ascend.refusals import refuse_lists_that_the_host_misreads


def install() -> None:
    """Check this vLLM-Ascend, then put the agent in place of its balancer: all of it or nothing.

    Raises
    ------
    UnsupportedEngineError
        Where ``known`` does not list this release, or a function in it is not the known one.
    """
    from vllm_ascend._version import __version__

    compat.require("vLLM-Ascend", __version__, KNOWN)
    import vllm_ascend.worker.model_runner_v1 as runner
    from vllm_ascend.worker.worker import NPUWorker

    replace_balancer(runner)
    _mark_dummy_runs(runner.NPUModelRunner)
    count_sources()
    # Release 0.18 has none of the two; that 0.23 has both was checked above.
    updates = [name for name in ("start_weight_update", "update_weights") if hasattr(NPUWorker, name)]
    refuse_other_weights(NPUWorker, *updates)
    refuse_other_weights(runner.NPUModelRunner, "reload_weights")


def replace_balancer(runner: ModuleType) -> None:
    """What the runner makes where ``dynamic_eplb`` is on: no subprocess, no staging, the agent for the updator."""
    replacements: dict[str, Any] = {
        "Manager": NoManager,
        "EplbProcess": NoProcess,
        "EplbUpdator": AscendBalancer,
        "VllmEplbAdaptor": LayerFinder,
    }
    for name in replacements:
        getattr(runner, name)
    for name, replacement in replacements.items():
        setattr(runner, name, replacement)


def count_sources() -> None:
    """Count choices before dispatch, in every communication method but the fused one, which is refused."""
    from vllm_ascend.ops.fused_moe import moe_mlp
    from vllm_ascend.ops.fused_moe.moe_comm_method import AllGatherCommImpl, MC2CommImpl, MoECommMethod

    fused_experts = MoECommMethod.fused_experts

    def fused_experts_counted(self: Any, fused_experts_input: Any) -> Any:
        balancer = AscendBalancer.of_this_process
        if balancer is not None and balancer.sources is not None:
            weights = fused_experts_input.weights
            refuse_lists_that_the_host_misreads(
                weights.w1_scale,
                weights.w2_scale,
                mc2=isinstance(self, MC2CommImpl),
                kernel_for_lists=moe_mlp._custom_gmm_swiglu_enabled(self.use_fusion_ops, dynamic_eplb=True),
            )
            balancer.sources.count(fused_experts_input, isinstance(self, AllGatherCommImpl))
        return fused_experts(self, fused_experts_input)

    MoECommMethod.fused_experts = fused_experts_counted


def _mark_dummy_runs(runner: Any) -> None:
    """Forward passes of dummies count as passes, not as tokens of this rank."""
    dummy_run = runner._dummy_run

    def dummy_run_marked(self: Any, *arguments: Any, **named: Any) -> Any:
        balancer = getattr(self, "eplb_updator", None)
        if not isinstance(balancer, AscendBalancer):
            return dummy_run(self, *arguments, **named)
        with balancer.dummies():
            return dummy_run(self, *arguments, **named)

    runner._dummy_run = dummy_run_marked


def refuse_other_weights(owner: Any, *names: str) -> None:
    """Calls that load weights raise while experts are balanced: the host puts them into new tensors."""

    def refusing(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
            if AscendBalancer.of_this_process is not None:
                raise RuntimeError(
                    f"{change.__name__}: vLLM-Ascend loads weights into new tensors, while eplb-agent moves experts "
                    "between the ones that it started with; start the engine again, or unset EPLB_AGENT_SERVICE to "
                    "load while serving"
                )
            return change(self, *arguments, **named)

        return refuse

    for name in names:
        setattr(owner, name, refusing(getattr(owner, name)))
