"""Prototype: EPLB policy for the hooks that vllm-project/vllm#49700 proposes, which pass the window step by step.

The pull request has changed several times. At commit e99241da2c4372349a52b2e6b1c9af09afd97d7e, ``plan_rebalance`` takes
a context of CPU tensors. In a later revision, policies implement it, and it also takes the model's policy state. In
that revision, the context has the window as ``[samples, layers, experts]`` and the CPU group. This module implements
the later revision, and accepts calls with and without the state. No release of vLLM has these hooks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.distributed.eplb.policy import EPLB_POLICIES, AbstractEplbPolicy, EplbPlan

from eplb_core.planner.settings import EVEN
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.parts import parts_of_window, without_copies
from worker_agent.policy.service import service_decision
from worker_agent.settings import AgentSettings


class PlannerPolicy(AbstractEplbPolicy):  # type: ignore[misc]
    """Policy for one EPLB state. It lets this project's planner decide.

    The planner needs no state between decisions, so ``on_layer_committed`` is inherited and does nothing.
    """

    def __init__(self) -> None:
        self._fallback = type(self).fallback()
        self._agreement: Agreement | None = None

    fallback: Any = None
    """Class of vLLM's own policy, which decides if the planner cannot."""

    def plan_rebalance(self, context: Any, *policy_state: Any) -> Any:
        """Return the plan, equal on all ranks (collective over the context's CPU group).

        Parameters
        ----------
        context
            vLLM's ``EplbRebalanceContext``.
        *policy_state
            The model's state, which only vLLM's own policy needs.
        """
        # vLLM passes the group only here. vLLM's policy makes the first decision unless the planner is ready by then.
        if self._agreement is None:
            self._agreement = Agreement(context.cpu_group, EVEN, service_decision(AgentSettings(), EVEN))
        old = context.physical_to_logical_map_cpu
        topology = context.topology
        if tuple(old.shape) == (old.shape[0], context.num_replicas) and int(old.min()) >= 0:
            parts_NLE = parts_of_window(context.load_window_cpu.long(), AgentSettings().window_parts).numpy()
            new_LP = self._agreement.placement(
                without_copies(parts_NLE, topology.num_ranks),
                old.numpy().astype(np.int64),
                topology.num_ranks,
                nodes=topology.num_nodes,
                timed=len(parts_NLE) > 1,
            )
            if new_LP is not None:
                return EplbPlan(torch.from_numpy(new_LP.copy()).to(old.dtype))
        return self._fallback.plan_rebalance(context, *policy_state)


def install() -> None:
    """Replace vLLM's default policy."""
    if EPLB_POLICIES["default"] is not PlannerPolicy:
        PlannerPolicy.fallback = EPLB_POLICIES["default"]
        EPLB_POLICIES["default"] = PlannerPolicy
