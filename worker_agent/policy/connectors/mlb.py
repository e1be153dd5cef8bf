"""Prototype: EPLB connector for vLLM's MLB fork. It needs no plugin and no environment variable.

The interface is that of ``vllm/distributed/eplb/connector/base.py`` in yunyang1999/vllm at commit
4c90489c201c9f92ffbc80575b9694d0a81a8ebf. It may never be merged into vLLM. Start the engine with::

    --eplb-config '{"connector": "PlannerConnector", "use_async": false,
                    "connector_module_path": "worker_agent.policy.connectors.mlb"}'

The connector decides only placements. The engine still chooses replicas with its hash.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.eplb.connector import EplbConnectorBase

from eplb_core.planner.settings import EVEN
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.service import service_decision
from worker_agent.policy.vllm import PlannerPolicy, check_interface, hand_over_windows
from worker_agent.settings import AgentSettings


class PlannerConnector(EplbConnectorBase):  # type: ignore[misc]
    """Connector that lets this project's planner decide placements."""

    def __init__(self, eplb_config: Any) -> None:
        super().__init__(eplb_config)
        self.placement_policy(eplb_config)
        # The connector passes only the sum of the window, which leads to worse decisions than a window divided into
        # parts.
        hand_over_windows(AgentSettings().window_parts)

    @classmethod
    def placement_policy(cls, eplb_config: Any) -> type[PlannerPolicy]:  # noqa: ARG003, part of the interface
        """Return the policy class that vLLM calls at each rearrangement."""
        from vllm.distributed.eplb.policy import EPLB_POLICIES

        if PlannerPolicy.fallback is None:
            check_interface()
            PlannerPolicy.fallback = EPLB_POLICIES["default"]
        return PlannerPolicy

    def bind_routing(self, **_: Any) -> None:
        """Join the EP ranks once vLLM has built its state; the connector does not route."""
        from vllm.distributed.parallel_state import get_eplb_group

        if PlannerPolicy.agreement is None:
            remote = service_decision(AgentSettings(), EVEN)
            PlannerPolicy.agreement = Agreement(get_eplb_group().cpu_group, EVEN, remote)
            PlannerPolicy.agreement.wait_until_warm()
