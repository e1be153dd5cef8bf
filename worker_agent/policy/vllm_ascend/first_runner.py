"""Policy mode in vLLM-Ascend's first model runner, from 0.23 to 0.30.

Without the agent, each rank's EPLB process decides for itself, and no rank compares its table with another rank's. If
two tables differed, ranks would wait for transfers that no other rank sends. Therefore, the first rank decides here,
and the ranks share its table over the engine's CPU group. The EPLB processes only derive the transfers from it:

1. At the end of the collection interval, the first rank starts the decision in a thread, while the model keeps serving.
2. Halfway to the step at which the engine needs the result, the first rank broadcasts the table. Each rank then wakes
   its EPLB process, which would otherwise have been woken in step 1.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any

import torch

from eplb_core.planner.settings import EVEN
from worker_agent.adapters.compat import Function, UnsupportedEngineError, mismatches
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.figures import Int64
from worker_agent.policy.parts import heat_of_slots, parts_of_window
from worker_agent.policy.service import service_decision
from worker_agent.policy.vllm_ascend.loading import refuse_loading
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")

_TABLE = "eplb_agent_table"
"""Key of the agreed table in the dictionary that a rank shares with its EPLB process.

The value is ``None`` if the engine's own policy decides.
"""

_UPDATOR = "vllm_ascend.eplb.eplb_updator:EplbUpdator"
_WORKER = "vllm_ascend.eplb.core.eplb_worker:EplbWorker"
_KNOWN = {
    f"{_UPDATOR}.__init__": Function(
        ("self", "eplb_config", "loader", "eplb_process", "process"), "5cc476b59d8ff80b"
    ),
    f"{_UPDATOR}.init_eplb": Function(("self", "expert_map_path", "process"), "e10269ad800d3712"),
    f"{_UPDATOR}.forward_before": Function(("self",), "8b7fc3b337e0e581"),
    f"{_UPDATOR}.forward_end": Function(("self", "eplb_heat_collection_status"), "575d85cf96e5829b"),
    f"{_UPDATOR}.get_update_info_flag": Function(("self",), "6a3a8b28bb75ba92"),
    f"{_UPDATOR}.update_iteration": Function(("self",), "51a702f099c2cfd2"),
    f"{_UPDATOR}.wakeup_eplb_worker": Function(("self",), "b19d9b16299bbefd"),
    f"{_UPDATOR}.wakeup_eplb_worker_flag": Function(("self",), "1cbf20ac1a8d3a2e"),
    f"{_WORKER}.__init__": Function(
        ("self", "shared_dict", "policy_type", "enable_d2d", "tp_size"), "fbfb44662a4dc137"
    ),
    f"{_WORKER}.calculate_rebalance_experts": Function(
        ("self", "load_info", "old_placement"), "c9c94b092869eb43"
    ),
    f"{_WORKER}.check_expert_placement": Function(
        ("self", "old_placement", "new_placement"), "b0a0989d5bd99c87"
    ),
    f"{_WORKER}.do_update": Function(("self",), "41ee867d9d21b4f8"),
    f"{_WORKER}.global2local": Function(("self", "placement", "E_local"), "867d08499f19f0a4"),
}
"""Functions of the EPLB cycle that this module relies on. They are the same in 0.23, 0.25, 0.28 and 0.30."""


class AgreedTable:
    """Policy of a rank's EPLB process that returns the table on which all ranks agreed.

    Parameters
    ----------
    fallback
        The engine's own policy, which decides if the ranks have not agreed on a table.
    shared_dict
        Dictionary that the engine shares with its EPLB process.
    """

    def __init__(self, fallback: Any, shared_dict: Any) -> None:
        self._fallback = fallback
        self._shared_dict = shared_dict

    def rebalance_experts(self, current_expert_table: Any, expert_workload: Any) -> tuple[int, Any, Any]:
        """Return whether the table changes, the layers in order of priority, and the new table, ``[L, R, S]``."""
        table_LRS = self._shared_dict.get(_TABLE)
        if table_LRS is None:
            result: tuple[int, Any, Any] = self._fallback.rebalance_experts(
                current_expert_table, expert_workload
            )
            return result
        changed = int(not torch.equal(table_LRS, torch.as_tensor(current_expert_table)))
        return changed, list(range(len(table_LRS))), table_LRS


class CyclePlanner:
    """Planner of one rank. It makes one decision in each EPLB cycle of the rank's ``EplbUpdator``.

    Parameters
    ----------
    updator
        The engine's ``EplbUpdator``.
    settings
        The agent's settings.
    """

    def __init__(self, updator: Any, settings: AgentSettings) -> None:
        self._updator = updator
        self._parts = settings.window_parts
        self._agreement = Agreement(updator.comm_group.cpu_group, EVEN, service_decision(settings, EVEN))
        self._agreement.wait_until_warm()
        self._nodes = _nodes_of(updator.comm_group.cpu_group)
        self._thread = ThreadPoolExecutor(1, "eplb-policy") if self._agreement.is_first else None
        self._totals: list[torch.Tensor] = []
        """Counts of this rank's slots since the start of the cycle, ``[L, S]``, at the end of each part so far."""
        self._shape: tuple[int, int, int] | None = None
        """Numbers of layers, ranks and slots of the decision that the ranks have not yet shared."""
        self._decision: Future[Int64 | None] | None = None

    def begin(self) -> None:
        """Gather the heat of the interval, and start the decision (collective over the EP group)."""
        updator = self._updator
        local_NLS = self._local_parts()
        parts_LRNS = updator.comm_group.all_gather(
            local_NLS.transpose(0, 1).unsqueeze(1).contiguous(), dim=1
        ).cpu()
        layers, ranks, _, slots = parts_LRNS.shape
        self._shape = (layers, ranks, slots)
        if self._thread is not None:
            self._decision = self._thread.submit(self._decide, parts_LRNS.permute(2, 0, 1, 3))

    def after_step(self) -> None:
        """Record the end of a part, or share the decision if it is due. Called after each counted step."""
        updator = self._updator
        step = updator.cur_iterations
        interval = updator.expert_heat_collection_interval
        if step == 0:
            self._totals.clear()
        elif step < interval:
            parts = min(self._parts, interval)
            if not updator.multi_stage and step * parts // interval != (step - 1) * parts // interval:
                self._totals.append(updator.adaptor.get_rank_expert_workload())
        elif self._shape is not None and step >= interval + (updator.algorithm_execution_interval - 1) // 2:
            self._hand_over(*self._shape)
            self._shape = None

    def _local_parts(self) -> torch.Tensor:
        """Return the counts of this rank's slots in each part of the interval, oldest first, ``[N, L, S]``."""
        counts = self._updator.adaptor.get_rank_expert_workload()
        if self._updator.multi_stage:
            return parts_of_window(counts.transpose(0, 1), self._parts)
        totals_NLS = torch.stack([*self._totals, counts])
        return torch.cat([totals_NLS[:1], totals_NLS.diff(dim=0)])

    def _decide(self, parts_NLRS: torch.Tensor) -> Int64 | None:
        """Return the new placement, int64 ``[L, P]``; ``None`` if the engine's own policy must decide."""
        try:
            maps_LRE = self._updator.shared_dict["expert_maps"]
            old_LRS = table_of_maps(maps_LRE, parts_NLRS.shape[3])
            ranks = old_LRS.shape[1]
            heat_NLE = heat_of_slots(parts_NLRS.flatten(2), old_LRS.flatten(1), maps_LRE.shape[2])
            return self._agreement.decided_here(
                heat_NLE.numpy(),
                old_LRS.flatten(1).numpy(),
                ranks,
                nodes=self._nodes,
                timed=len(heat_NLE) > 1,
            )
        except Exception as error:
            _log.error("the agent failed to decide; the engine's own policy decides instead", exc_info=error)
            return None

    def _hand_over(self, layers: int, ranks: int, slots: int) -> None:
        """Share the decision (collective over the EP group), and wake this rank's EPLB process."""
        decided = self._decision.result() if self._decision is not None else None
        agreed_LP = self._agreement.share(decided, (layers, ranks * slots))
        self._updator.shared_dict[_TABLE] = (
            None if agreed_LP is None else torch.from_numpy(agreed_LP.reshape(layers, ranks, slots).copy())
        )
        self._updator.eplb_process.planner_q.put(1)


def table_of_maps(maps_LRE: torch.Tensor, slots: int) -> torch.Tensor:
    """Return the expert in each slot, int64 ``[L, R, slots]``, or -1 if the slot is empty.

    Parameters
    ----------
    maps_LRE
        Integers ``[L, R, E]``, the slot of each expert on each rank, or -1.
    slots
        S, number of slots per rank.

    Examples
    --------
    >>> table_of_maps(torch.tensor([[[0, -1, 1], [-1, 1, 0]]]), slots=2).tolist()
    [[[0, 2], [2, 1]]]
    """
    table_LRS = torch.full((*maps_LRE.shape[:2], slots), -1, dtype=torch.int64)
    layer_X, rank_X, expert_X = (maps_LRE >= 0).nonzero(as_tuple=True)
    table_LRS[layer_X, rank_X, maps_LRE[layer_X, rank_X, expert_X].long()] = expert_X
    return table_LRS


def install() -> None:
    """Patch the first model runner's ``EplbWorker`` and ``EplbUpdator``.

    When the engine creates its updater, calls that load weights are patched as well, and fail from then on.

    Raises
    ------
    UnsupportedEngineError
        If functions that this module relies on have changed, and ``allow_unverified_engine`` is off. In that case,
        nothing is patched.
    """
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.eplb.core.eplb_worker import EplbWorker
    from vllm_ascend.eplb.eplb_updator import EplbUpdator

    settings = AgentSettings()
    check_functions(settings.allow_unverified_engine)
    init_worker = EplbWorker.__init__
    init_updator = EplbUpdator.__init__
    wake = EplbUpdator.wakeup_eplb_worker
    forward_end = EplbUpdator.forward_end

    @wraps(init_worker)
    def init_with_agreed_table(self: Any, shared_dict: Any, *arguments: Any, **keywords: Any) -> None:
        init_worker(self, shared_dict, *arguments, **keywords)
        self.policy = AgreedTable(self.policy, shared_dict)

    @wraps(init_updator)
    def init_with_planner(self: Any, *arguments: Any, **keywords: Any) -> None:
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

        refuse_loading(NPUModelRunner)
        init_updator(self, *arguments, **keywords)
        self.eplb_agent_planner = None
        if getattr(get_ascend_config(), "mix_placement", False):
            _log.warning(
                "shared experts are placed like routed ones (mix_placement), so the engine's own policy decides"
            )
            return
        self.eplb_agent_planner = CyclePlanner(self, settings)

    @wraps(wake)
    def begin_instead_of_waking(self: Any) -> None:
        if self.eplb_agent_planner is None:
            wake(self)
        else:
            self.eplb_agent_planner.begin()

    @wraps(forward_end)
    def forward_end_and_plan(self: Any, *arguments: Any, **keywords: Any) -> None:
        before = self.cur_iterations
        forward_end(self, *arguments, **keywords)
        if self.eplb_agent_planner is not None and self.cur_iterations != before:
            self.eplb_agent_planner.after_step()

    EplbWorker.__init__ = init_with_agreed_table
    EplbUpdator.__init__ = init_with_planner
    EplbUpdator.wakeup_eplb_worker = begin_instead_of_waking
    EplbUpdator.forward_end = forward_end_and_plan


def check_functions(allow_unverified: bool) -> None:
    """Raise ``UnsupportedEngineError`` if the engine's EPLB cycle differs from the known one."""
    from vllm_ascend._version import __version__

    differences = mismatches(_KNOWN, dict.fromkeys(_KNOWN))
    if not differences or (allow_unverified and not any(difference.fatal for difference in differences)):
        return
    described = "; ".join(f"{difference.target} {difference.reason}" for difference in differences)
    raise UnsupportedEngineError(
        f"vLLM-Ascend {__version__}",
        f"Its EPLB cycle has changed since 0.30: {described}",
        "Install vLLM-Ascend 0.23 to 0.30 or a newer agent",
    )


def _nodes_of(group: Any) -> int:
    """Return the number of nodes of a group (collective over the group)."""
    from vllm.distributed.parallel_state import _node_count

    return int(_node_count(group))
