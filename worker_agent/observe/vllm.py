"""Observe mode in vLLM: counts the routers' choices, with or without vLLM's EPLB, which keeps running.

Hooks run around the worker's methods that load the model and run a batch, at the point where every router has chosen
logical experts, and after vLLM's EPLB has committed a new map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eplb_core.placement import Int32
from worker_agent.adapters.batch import share_of_rank
from worker_agent.adapters.compat import Patches, read_known
from worker_agent.adapters.vllm.dispatch import dispatch_of, token_group
from worker_agent.observe.counter import RouterCounter
from worker_agent.observe.layout import ObservedLayout, experts_in_slots, linear, placement_of_slots
from worker_agent.observe.observer import (
    NotObservedError,
    Observer,
    harmless,
    meet,
    without_expert_parallelism,
)
from worker_agent.observe.worker import WorkerObservation, hooks_fit, watch_worker

_WORKER = "vllm.v1.worker.gpu_worker:Worker"
PATCHES: Patches = {
    "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._apply_eplb_mapping": 2,
    f"{_WORKER}.execute_model": 2,
    f"{_WORKER}.load_model": 1,
    f"{_WORKER}.compile_or_warm_up_model": 1,
}
"""Hooked functions listed in ``known.json``, with the number of leading parameters that the hooks declare."""


def install() -> None:
    """Add the hooks. If they do not fit this release of vLLM, log this and change nothing."""
    import vllm

    if not hooks_fit("vLLM", vllm.__version__, read_known("worker_agent.adapters.vllm"), PATCHES):
        return
    _count_choices()
    _follow_commits()
    from vllm.v1.worker.gpu_worker import Worker

    watch_worker(Worker, _observe)


def _count_choices() -> None:
    """Count choices at the point where routers map them to physical experts. Every router does, even without EPLB.

    Every layer routes inside vLLM's opaque operator, so graphs also capture the counting.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    map_choices = BaseRouter._apply_eplb_mapping

    def map_choices_observed(self: Any, topk_ids: Any) -> Any:
        if self.eplb_observed_layer is not None:
            observation, index = self.eplb_observed_layer
            observation.count(index, topk_ids)
        return map_choices(self, topk_ids)

    BaseRouter.eplb_observed_layer = None
    BaseRouter._apply_eplb_mapping = map_choices_observed


def _follow_commits() -> None:
    """Record each map that vLLM's EPLB commits, for all layers or for one. The maps are on the host."""
    from vllm.distributed.eplb import eplb_state

    commit = eplb_state._commit_eplb_maps
    commit_layer = eplb_state._commit_eplb_maps_for_layer

    def commit_observed(model_state: Any, new_physical_to_logical_map: Any, *rest: Any, **named: Any) -> None:
        commit(model_state, new_physical_to_logical_map, *rest, **named)
        observation = getattr(model_state, "eplb_observation", None)
        if observation is not None:
            observation.moved(slice(None), new_physical_to_logical_map)

    def commit_layer_observed(
        model_state: Any, new_physical_to_logical_map: Any, layer: int, *rest: Any, **named: Any
    ) -> None:
        commit_layer(model_state, new_physical_to_logical_map, layer, *rest, **named)
        observation = getattr(model_state, "eplb_observation", None)
        if observation is not None:
            observation.moved(slice(layer, layer + 1), new_physical_to_logical_map)

    eplb_state._commit_eplb_maps = commit_observed
    eplb_state._commit_eplb_maps_for_layer = commit_layer_observed


@dataclass(frozen=True)
class _Model:
    """Target model of a worker, as described by its MoE layers.

    Parameters
    ----------
    layers
        Layers, or their runners, in order.
    experts
        E, logical experts per layer.
    device
        Device of the model.
    state
        vLLM's ``EplbModelState``; ``None`` without EPLB.
    """

    layers: list[Any]
    experts: int
    device: torch.device
    state: Any = None

    @classmethod
    def of(cls, worker: Any) -> _Model:
        """Find the layers of a worker's target model. Raises ``NotObservedError`` if it has none."""
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        runner = worker.model_runner
        modules = [
            module
            for module in runner.get_model().modules()
            if isinstance(getattr(module, "router", None), BaseRouter)
        ]
        # In some releases, a layer and its runner share a router.
        layers = list({id(module.router): module for module in reversed(modules)}.values())[::-1]
        if not layers:
            raise NotObservedError(
                "vLLM's routers choose no experts in this model; if it has MoE layers, they route in a different way"
            )
        for state in getattr(getattr(runner, "eplb_state", None), "model_states", {}).values():
            balanced = list(state.model.moe_layers)
            if balanced and balanced[0].router in [layer.router for layer in layers]:
                experts = int(state.logical_replica_count.shape[1])
                return cls(balanced, experts, state.physical_to_logical_map.device, state)
        sizes = {int(layer.router.global_num_experts) for layer in layers}
        if len(sizes) > 1:
            raise NotObservedError(
                f"the model's MoE layers have different numbers of experts ({sorted(sizes)})"
            )
        return cls(layers, sizes.pop(), torch.device(runner.device))

    def local_experts(self) -> list[list[int]] | None:
        """Return the logical experts of each layer's local slots, or ``None`` without expert parallelism."""
        rows = []
        for layer in self.layers:
            expert_map = getattr(getattr(layer, "routed_experts", layer), "_expert_map", None)
            if expert_map is None:
                return None
            rows.append(experts_in_slots(expert_map.cpu().numpy()[: self.experts]))
        return rows


def _observe(worker: Any) -> VllmObservation:
    """Start observing a worker's model (collective over the EP group)."""
    model = _Model.of(worker)
    if any(dispatch_of(layer).monolithic for layer in model.layers):
        raise NotObservedError(
            "a kernel routes the model's tokens, and its choices cannot be counted; choose another MoE backend"
        )
    return VllmObservation(model, worker.vllm_config)


class VllmObservation(WorkerObservation):
    """Observation of one rank's target model.

    Parameters
    ----------
    model
        The model's MoE layers.
    config
        vLLM's ``VllmConfig``.
    """

    def __init__(self, model: _Model, config: Any) -> None:
        from vllm.distributed.parallel_state import get_ep_group

        group = get_ep_group()
        rank = int(group.rank_in_group)
        size = int(group.world_size)
        parallel = config.parallel_config
        dispatch = dispatch_of(model.layers[0])
        tokens = token_group(model.layers, parallel, rank, size)
        self._gathers = dispatch.naive
        local = model.local_experts() if model.state is None else None
        self._ranks, slots = meet(local, tokens.number, group.cpu_group)
        self._phy2log_LRS, note = _placement_of(model, slots)
        self._experts = model.experts
        removes_padding = not (self._gathers or dispatch.sequence_parallel)
        counter = RouterCounter(
            len(model.layers), model.experts, model.device, _max_rows(config) if removes_padding else 0
        )
        observer = Observer.start(counter.rings, self._layout, self._ranks, "vLLM", note)
        share = None
        if parallel.data_parallel_size == 1 or not self._gathers:
            share = share_of_rank(rank, size // parallel.data_parallel_size, tokens.number is not None)
        super().__init__(observer, counter, share)
        for index, layer in enumerate(model.layers):
            layer.router.eplb_observed_layer = (self, index)
        if model.state is not None:
            model.state.eplb_observation = self

    @property
    def _layout(self) -> ObservedLayout:
        return ObservedLayout(self._phy2log_LRS, self._experts)

    @harmless
    def count(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Count the choices of a layer's router."""
        if self._ranks.counts:
            self._counter.count(layer, topk_ids)
        else:
            self._counter.rings.layer_runs(layer, len(self._phy2log_LRS))

    def _counts(self) -> bool:
        # A rank without tokens may still count the tokens of other ranks, which are gathered before routing.
        return self._ranks.counts and (self._gathers or not self._is_dummy)

    @harmless
    def moved(self, layers: slice, phy2log: torch.Tensor) -> None:
        """Record a map that vLLM's EPLB has committed.

        Parameters
        ----------
        layers
            Layers that the map describes.
        phy2log
            Logical expert of each physical expert, ``[L, P]``, or ``[P]`` for one layer.
        """
        ranks = self._phy2log_LRS.shape[1]
        changed_LRS = self._phy2log_LRS.copy()
        changed_LRS[layers] = phy2log.cpu().numpy().reshape(-1, ranks, changed_LRS.shape[2])
        self._phy2log_LRS = changed_LRS
        self.observer.placed(self._layout)


def _placement_of(model: _Model, slots: list[list[list[int]] | None]) -> tuple[Int32, str]:
    """Return the placement of all ranks, int32 ``[L, R, S]``, and a sentence for the log.

    Parameters
    ----------
    model
        The model's MoE layers.
    slots
        Logical experts of each rank's local slots, by layer; ``None`` without expert parallelism.
    """
    layers = len(model.layers)
    size = len(slots)
    if model.state is not None:
        phy2log_LP = model.state.physical_to_logical_map.cpu().numpy().astype(np.int32)
        return phy2log_LP.reshape(layers, size, -1), "vLLM's EPLB moves experts"
    if size == 1:
        return linear(layers, model.experts, 1), "With one rank, there is no imbalance"
    if any(rank_slots is None for rank_slots in slots):
        return linear(layers, model.experts, size), without_expert_parallelism(size)
    return placement_of_slots([rank_slots for rank_slots in slots if rank_slots is not None]), ""


def _max_rows(config: Any) -> int:
    """Return the maximum number of rows in a batch, including the padding of captured graphs."""
    captured = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
    return max(int(config.scheduler_config.max_num_batched_tokens), int(captured))
