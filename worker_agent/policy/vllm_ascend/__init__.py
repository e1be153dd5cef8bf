"""Policy mode in vLLM-Ascend: the planner decides in place of the policy of either model runner."""

from __future__ import annotations

from worker_agent.policy.vllm import require_planner


def install() -> None:
    """Patch the EPLB of the model runner that this engine uses.

    As in vLLM-Ascend, only the variable ``VLLM_USE_V2_MODEL_RUNNER`` selects the runner, and the first runner is used
    if it is not set.

    Raises
    ------
    UnsupportedEngineError
        If this vLLM-Ascend has a different interface, or if the planner is not installed. In either case, nothing is
        patched.
    """
    from vllm import envs

    require_planner()
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        from worker_agent.policy.vllm_ascend.second_runner import install as install_into_runner
    else:
        from worker_agent.policy.vllm_ascend.first_runner import install as install_into_runner
    install_into_runner()


def check_interface() -> None:
    """Raise ``UnsupportedEngineError`` if the planner is not installed, or if the first runner has changed.

    The second runner is checked when the engine starts.
    """
    from vllm import envs

    require_planner()
    if not envs.VLLM_USE_V2_MODEL_RUNNER:
        from worker_agent.policy.vllm_ascend.first_runner import check_functions
        from worker_agent.settings import AgentSettings

        check_functions(AgentSettings().allow_unverified_engine)
