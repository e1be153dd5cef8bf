"""Policy mode in vLLM-Ascend's second model runner (0.30): the planner takes the place of STAIR or the default policy.

The engine always rebalances asynchronously, so the decision runs on the EPLB thread. After a decision, the engine's
routing tables (``routing_table``) are also written: immediately if a layer's placement stays the same, and otherwise
when the engine commits the layer.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.planner.settings import EVEN
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.figures import Int64
from worker_agent.policy.parts import parts_of_window
from worker_agent.policy.service import service_decision
from worker_agent.policy.vllm_ascend.loading import refuse_loading
from worker_agent.policy.vllm_ascend.routing_table import routing_table
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")

_PENDING = "_eplb_agent_routing_tables"
"""Attribute of a model's EPLB state that holds routing tables, by layer, until the engine commits the layer."""
_PARAMETERS = {
    "create_eplb_policy": ("policy", "stair_config"),
    "run_rebalance_experts": ("model_state", "eplb_state", "physical_to_logical_map_cpu"),
    "refresh_model_routing_tables": ("model_state", "layer_idx"),
}
"""First parameters of the patched functions in vLLM-Ascend 0.30."""


class PlannerPolicy:
    """EPLB policy for vLLM-Ascend. It lets this project's planner decide.

    Parameters
    ----------
    fallback
        The engine's own policy, which decides if the planner cannot.
    agreement
        Agreement of the EP ranks.
    parts
        Maximum number of parts into which the window is divided.
    """

    def __init__(self, fallback: Any, agreement: Agreement, parts: int) -> None:
        self.fallback = fallback
        self._agreement = agreement
        self._parts = parts
        self._rows_LP: Int64 | None = None
        if agreement.is_first:
            threading.Thread(target=_warm_up_dealing, name="eplb-policy-dealing", daemon=True).start()

    def prepare_local_load_stats(self, load_samples: torch.Tensor) -> Any:
        """Divide this rank's samples into parts before the engine sums them over the ranks.

        Parameters
        ----------
        load_samples
            Tokens that each slot received, oldest step first, ``[T, L, P]``.

        Returns
        -------
        PreparedLoadStats
            Sum of each part, ``[N, L, P]``, and its number of steps. STAIR also accepts this type.
        """
        from vllm_ascend.distributed.eplb.policy import PreparedLoadStats

        steps = torch.tensor_split(torch.arange(len(load_samples)), min(self._parts, len(load_samples)))
        counts_N = np.array([len(part) for part in steps], dtype=np.int64)
        return PreparedLoadStats(parts_of_window(load_samples, self._parts), counts_N)

    def rebalance_experts(
        self,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
        *,
        last_committed_mean_ratios: npt.NDArray[np.float64] | None = None,
        rank_node_ids: npt.NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Return the new placement, ``[layers, num_replicas]`` on the CPU, equal on all ranks.

        Parameters
        ----------
        weight
            ``PreparedLoadStats`` of all ranks by expert, or a tensor ``[L, E]`` or ``[N, L, E]``.
        num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
            As for vLLM's policies.
        last_committed_mean_ratios
            For STAIR only.
        rank_node_ids
            Node of each rank.
        """
        values = weight if isinstance(weight, torch.Tensor) else weight.values
        heat_NLE = values.reshape(-1, *values.shape[-2:]).long().cpu().numpy()
        old = old_global_expert_indices
        self._rows_LP = None
        if old is not None and tuple(old.shape) == (heat_NLE.shape[1], num_replicas) and int(old.min()) >= 0:
            old_LP = old.cpu().numpy().astype(np.int64)
            nodes = num_nodes if rank_node_ids is None else _consecutive_nodes(np.asarray(rank_node_ids))
            new_LP = self._agreement.placement(
                heat_NLE, old_LP, num_ranks, nodes=nodes, timed=len(heat_NLE) > 1
            )
            if new_LP is not None:
                self._rows_LP = self._agreed_rows(heat_NLE, new_LP, num_ranks)
                return torch.from_numpy(new_LP.copy()).to(old.dtype)
        return self._by_engine(
            weight,
            (num_replicas, num_groups, num_nodes, num_ranks, old),
            {"last_committed_mean_ratios": last_committed_mean_ratios, "rank_node_ids": rank_node_ids},
        )

    def take_rows(self) -> Int64 | None:
        """Remove and return the number of table rows of each slot in the last decision, int64 ``[L, P]``.

        Return ``None`` if there are none. In that case, the engine fills its own tables.
        """
        rows_LP, self._rows_LP = self._rows_LP, None
        return rows_LP

    def _agreed_rows(self, heat_NLE: npt.NDArray[np.generic], new_LP: Int64, ranks: int) -> Int64 | None:
        """Compute table rows on the first rank and return them on all ranks (collective over the group)."""
        rows_LP = None
        if self._agreement.is_first:
            try:
                from worker_agent.policy.vllm_ascend.dealing import rows_of_slots

                rows_LP = rows_of_slots(heat_NLE, new_LP, ranks)
            except Exception as error:
                _log.error("replicas take equal turns, because computing their shares failed", exc_info=error)
        return self._agreement.share(rows_LP, new_LP.shape)

    def _by_engine(self, weight: Any, arguments: tuple[Any, ...], of_stair: dict[str, Any]) -> torch.Tensor:
        new: torch.Tensor
        if callable(getattr(self.fallback, "prepare_local_load_stats", None)):
            new = self.fallback.rebalance_experts(weight, *arguments, **of_stair)
        else:
            values = weight if isinstance(weight, torch.Tensor) else weight.values
            total_LE = values if values.ndim == 2 else values.sum(dim=0)
            new = self.fallback.rebalance_experts(total_LE, *arguments)
        return new


def _warm_up_dealing() -> None:
    """Compile the kernels before the first decision, because the EPLB thread shares the interpreter with the model."""
    try:
        from worker_agent.policy.vllm_ascend.dealing import warm_up

        warm_up()
    except Exception as error:
        _log.error(
            "replicas will take equal turns, because the kernels that compute their shares failed",
            exc_info=error,
        )


def _consecutive_nodes(node_R: npt.NDArray[np.int64]) -> int:
    """Return the number of nodes if each has the same number of consecutive ranks, and 1 otherwise.

    Examples
    --------
    >>> _consecutive_nodes(np.array([0, 0, 1, 1])), _consecutive_nodes(np.array([0, 1, 0, 1]))
    (2, 1)
    """
    nodes = len(np.unique(node_R))
    is_regular = len(node_R) % nodes == 0 and np.array_equal(
        np.unique(node_R, return_inverse=True)[1], np.arange(len(node_R)) * nodes // len(node_R)
    )
    return nodes if is_regular else 1


def install() -> None:
    """Replace the policy that the second runner creates, and write the routing tables after its decisions.

    Raises
    ------
    UnsupportedEngineError
        If this vLLM-Ascend has a different interface. In that case, nothing is patched.
    """
    from vllm.distributed import get_eplb_group
    from vllm.distributed.eplb import async_worker

    try:
        from vllm_ascend.distributed.eplb import eplb_state as states
        from vllm_ascend.distributed.eplb.policy import factory
        from vllm_ascend.patch.platform import patch_eplb
        from vllm_ascend.worker.v2 import eplb as runner_eplb
    except ImportError as error:
        raise _unsupported(f"Its second model runner has no EPLB policies ({error})") from error

    create = factory.create_eplb_policy
    run = async_worker.run_rebalance_experts
    refresh = states.refresh_model_routing_tables
    for function in (create, run, refresh):
        _check_parameters(function)
    settings = AgentSettings()

    @wraps(create)
    def create_planner_policy(policy: str, stair_config: Any) -> Any:
        return _with_planner(create(policy, stair_config), settings)

    @wraps(run)
    def run_and_deal(
        model_state: Any, eplb_state: Any, physical_to_logical_map_cpu: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        target: torch.Tensor = run(model_state, eplb_state, physical_to_logical_map_cpu, *rest)
        if isinstance(eplb_state.policy, PlannerPolicy):
            group = get_eplb_group().cpu_group
            tables = _tables_of(eplb_state.policy.take_rows(), target, group.rank(), group.size())
            _note_tables(model_state, tables, physical_to_logical_map_cpu, target)
        return target

    @wraps(refresh)
    def refresh_and_deal(model_state: Any, layer_idx: int | None = None) -> None:
        refresh(model_state, layer_idx)
        pending = getattr(model_state, _PENDING, {})
        if layer_idx is None:
            pending.clear()
        elif layer_idx in pending:
            write_table(model_state, layer_idx, pending.pop(layer_idx))

    for module in (factory, runner_eplb):
        module.create_eplb_policy = create_planner_policy
    async_worker.run_rebalance_experts = run_and_deal
    for module in (states, patch_eplb):
        module.refresh_model_routing_tables = refresh_and_deal


def _with_planner(engine_policy: Any, settings: AgentSettings) -> Any:
    """Return a ``PlannerPolicy`` that falls back to the engine's policy; only the engine's policy if EPLB is off."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_eplb_group
    from vllm_ascend.worker.v2.model_runner import NPUModelRunner

    if not get_current_vllm_config().parallel_config.enable_eplb:
        return engine_policy
    refuse_loading(NPUModelRunner)
    agreement = Agreement(get_eplb_group().cpu_group, EVEN, service_decision(settings, EVEN))
    agreement.wait_until_warm()
    return PlannerPolicy(engine_policy, agreement, settings.window_parts)


def _tables_of(rows_LP: Int64 | None, target: torch.Tensor, rank: int, ranks: int) -> dict[int, torch.Tensor]:
    """Return this rank's routing tables by layer; empty if the engine's own policy decided."""
    if rows_LP is None:
        return {}
    return {
        layer: torch.from_numpy(routing_table(rows_P, slots_P, rank, ranks))
        for layer, (rows_P, slots_P) in enumerate(zip(rows_LP, target.numpy().astype(np.int64), strict=True))
    }


def _note_tables(
    model_state: Any, tables: dict[int, torch.Tensor], old_LP: torch.Tensor, new_LP: torch.Tensor
) -> None:
    """Write the tables of unchanged layers, and store the other tables until their layers are committed."""
    changes_L = (old_LP != new_LP).any(dim=1).tolist()
    setattr(model_state, _PENDING, {layer: table for layer, table in tables.items() if changes_L[layer]})
    for layer, table in tables.items():
        if not changes_L[layer]:
            write_table(model_state, layer, table)


def write_table(model_state: Any, layer: int, table_DE: torch.Tensor) -> None:
    """Write a layer's routing table in place, except for entries whose slot does not hold the expert.

    Those entries keep the engine's own values, so no token can reach a slot with another expert's weights. The check
    runs on the device, and the host does not wait for it.
    """
    routing = model_state.model.moe_layers[layer].eplb_state.expert_replica_routing_table
    ours_DE = table_DE.to(routing.device)
    if ours_DE.shape != routing.shape:
        return
    held_DE = model_state.physical_to_logical_map[layer][ours_DE.long()]
    is_held = held_DE == torch.arange(routing.shape[1], device=routing.device)
    routing.copy_(torch.where(is_held, ours_DE, routing))


def _check_parameters(function: Callable[..., Any]) -> None:
    expected = _PARAMETERS[function.__name__]
    actual = tuple(inspect.signature(function).parameters)
    if actual[: len(expected)] != expected:
        raise _unsupported(
            f"{function.__name__} takes ({', '.join(actual)}) instead of ({', '.join(expected)})"
        )


def _unsupported(reason: str) -> UnsupportedEngineError:
    from vllm_ascend._version import __version__

    return UnsupportedEngineError(
        f"vLLM-Ascend {__version__} with the second model runner",
        reason,
        "Install vLLM-Ascend 0.30 or a newer agent, or use the first model runner (unset VLLM_USE_V2_MODEL_RUNNER)",
    )
