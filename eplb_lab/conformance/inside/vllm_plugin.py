"""Plugin for vLLM: the kit's orders replace the default policy of vLLM's own EPLB, which moves the weights."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from eplb_lab.conformance.inside.orders import CONTROL, FOLDER, TABLE, Orders, left_behind


def register() -> None:
    """Install the plugin if the kit started this process. vLLM calls this one or more times in each process."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from vllm.distributed.eplb import eplb_state
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    if isinstance(EPLB_POLICIES["default"], _OrderedPolicy):
        return
    # Keep the name "default", because asynchronous EPLB rejects all other names.
    EPLB_POLICIES["default"] = _OrderedPolicy(Orders(Path(folder)))
    if os.environ.get(CONTROL):
        eplb_state.EplbState.step = _faulty(eplb_state.EplbState.step)


class _OrderedPolicy:
    """Policy with the interface of ``AbstractEplbPolicy``. vLLM calls its only method on every rank."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def rebalance_experts(
        self,
        _weight: Any,
        _num_replicas: int,
        _num_groups: int,
        _num_nodes: int,
        _num_ranks: int,
        old_global_expert_indices: Any,
    ) -> Any:
        """Return the ordered placement, or the current one."""
        import torch
        from vllm.distributed import parallel_state

        # The asynchronous policy runs in its own thread. This is the only group on which the main thread runs no
        # collectives.
        group = getattr(parallel_state, "get_eplb_group", parallel_state.get_ep_group)()

        def send(box: list[Any]) -> None:
            torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)

        placement = self._orders.decide(old_global_expert_indices.tolist(), group.rank_in_group, send)
        return torch.tensor(placement, dtype=old_global_expert_indices.dtype)


def _faulty(step: Any) -> Any:
    """Wrap ``EplbState.step`` so that a move leaves something of the first layer behind."""
    tensor = left_behind()

    @functools.wraps(step)
    def faulty_step(self: Any, *arguments: Any, **named: Any) -> Any:
        from vllm.distributed.parallel_state import get_ep_group

        models = list(self.model_states.values())
        if not models:
            return step(self, *arguments, **named)
        model = models[0]
        weights = model.model.expert_weights[0]
        # The fault applies if the expert in the first slot of this rank changes.
        first = get_ep_group().rank_in_group * weights[0].shape[0]
        before = int(model.physical_to_logical_map[0, first])
        behind = [weights[tensor][0]] if tensor is not None else []
        keeps_table = os.environ[CONTROL] == TABLE
        if keeps_table:
            behind = [model.logical_to_physical_map[0], model.logical_replica_count[0]]
        saved = [part.clone() for part in behind]
        result = step(self, *arguments, **named)
        # Every rearrangement writes all tables, even if nothing moves, so a table must be restored each time.
        if keeps_table or int(model.physical_to_logical_map[0, first]) != before:
            for part, old in zip(behind, saved, strict=True):
                part.copy_(old)
        return result

    return faulty_step
