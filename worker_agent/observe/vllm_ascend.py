"""Observe mode in vLLM-Ascend's first model runner: counts choices before dispatch, with or without dynamic EPLB.

Hooks run around the worker's methods that load the model and run a batch, before every layer's tokens are dispatched,
and after dynamic EPLB, which keeps running, has replaced a layer's experts.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from eplb_core.placement import Int32
from worker_agent.adapters.batch import share_of_rank
from worker_agent.adapters.compat import Patches, read_known
from worker_agent.adapters.vllm_ascend.host import slots_of_maps
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

PATCHES: Patches = {"vllm_ascend.ops.fused_moe.moe_comm_method:MoECommMethod.fused_experts": 2}
"""Hooked functions listed in ``known.json``, with the number of leading parameters that the hooks declare."""


def install() -> None:
    """Add the hooks. If they do not fit this release of vLLM-Ascend, log this and change nothing."""
    from vllm_ascend._version import __version__

    releases = read_known("worker_agent.adapters.vllm_ascend")
    if not hooks_fit("vLLM-Ascend", __version__, releases, PATCHES):
        return
    from vllm_ascend.worker.worker import NPUWorker

    _count_choices()
    _follow_updates()
    watch_worker(NPUWorker, _observe)


def _count_choices() -> None:
    """Count choices before dispatch, in every communication method."""
    from vllm_ascend.ops.fused_moe import moe_comm_method

    def observe(owner: Any) -> None:
        fused_experts = owner.fused_experts

        def fused_experts_observed(self: Any, fused_experts_input: Any, *rest: Any, **named: Any) -> Any:
            observation = AscendObservation.current
            if observation is not None:
                gathers = isinstance(self, moe_comm_method.AllGatherCommImpl)
                observation.count(fused_experts_input, gathers)
            return fused_experts(self, fused_experts_input, *rest, **named)

        owner.fused_experts = fused_experts_observed

    for owner in vars(moe_comm_method).copy().values():
        if isinstance(owner, type) and "fused_experts" in vars(owner):
            observe(owner)


def _follow_updates() -> None:
    """Record each layer whose experts dynamic EPLB has replaced."""
    from vllm_ascend.eplb.core.eplb_device_transfer_loader import D2DExpertWeightLoader

    update = D2DExpertWeightLoader.update_expert_map_and_weight

    def update_observed(self: Any, *arguments: Any, **named: Any) -> Any:
        layer = self.layer_id
        table_E = getattr(self, "updated_log2phy_map", None)
        result = update(self, *arguments, **named)
        observation = AscendObservation.current
        # The loader resets its layer once the layer's experts are in place.
        if observation is not None and layer >= 0 and self.layer_id != layer:
            observation.replaced(layer, table_E)
        return result

    D2DExpertWeightLoader.update_expert_map_and_weight = update_observed


def _observe(worker: Any) -> AscendObservation:
    """Start observing a worker's model (collective over the EP group)."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") == "1":
        raise NotObservedError(
            "the second model runner maps choices in a kernel that is unknown to the agent"
        )
    AscendObservation.current = AscendObservation(worker)
    return AscendObservation.current


class AscendObservation(WorkerObservation):
    """Observation of one rank's target model.

    With all-gather dispatch, every rank sees all tokens, and only the first rank counts them. Otherwise, each rank
    counts its own tokens.

    Parameters
    ----------
    worker
        vLLM-Ascend's ``NPUWorker`` with the loaded model.
    """

    current: AscendObservation | None = None

    def __init__(self, worker: Any) -> None:
        from vllm.distributed.parallel_state import get_dp_group, get_ep_group

        runner = worker.model_runner
        layers = _layers_of(runner.get_model())
        group = get_ep_group()
        size = int(group.world_size)
        experts = int(layers[0].global_num_experts) - int(layers[0].global_redundant_expert_num)
        self._runner = runner
        self._first_rank = int(group.rank_in_group) == 0
        self._experts = experts
        self._new_maps_LRE: Int32 | None = None
        self._indices: dict[int, int] = {}
        balances = layers[0].log2phy is not None
        local = None
        if not balances and all(layer._expert_map is not None for layer in layers):
            local = [experts_in_slots(layer._expert_map.cpu().numpy()[:experts]) for layer in layers]
        ranks, slots = meet(local, None, group.cpu_group)
        note = ""
        self._table_LE = None
        if balances:
            maps_LRE = np.stack([layer.global_expert_map.cpu().numpy() for layer in layers])
            self._phy2log_LRS = slots_of_maps(maps_LRE)
            self._table_LE = np.stack([layer.log2phy.cpu().numpy() for layer in layers]).astype(np.int32)
            note = "vLLM-Ascend's EPLB moves experts"
        elif size == 1 or local is None:
            self._phy2log_LRS = linear(len(layers), experts, size)
            note = without_expert_parallelism(size) if size > 1 else "With one rank, there is no imbalance"
        else:
            self._phy2log_LRS = placement_of_slots(slots)
        counter = RouterCounter(len(layers), experts, torch.device(runner.device))
        observer = Observer.start(counter.rings, self._layout, ranks, "vLLM-Ascend", note)
        # In a step that gathers, the first rank counts all tokens, so no rank's own number is known here.
        share = share_of_rank(int(group.rank_in_group), size // get_dp_group().world_size, shared=False)
        super().__init__(observer, counter, share)

    @property
    def _layout(self) -> ObservedLayout:
        return ObservedLayout(self._phy2log_LRS, self._experts, self._table_LE)

    @harmless
    def count(self, fused_experts_input: Any, gathers: bool) -> None:
        """Count the choices that a layer is about to dispatch.

        Parameters
        ----------
        fused_experts_input
            Input of vLLM-Ascend's communication method.
        gathers
            True if the layer dispatches by all-gather.
        """
        layer = getattr(fused_experts_input, "layer", None)  # None before release 0.30
        index = self._index(fused_experts_input.weights.w1 if layer is None else layer)
        if index is None:
            return
        if gathers and not self._first_rank:
            self._counter.rings.layer_runs(index, len(self._phy2log_LRS))
            return
        mask_T = None if gathers else fused_experts_input.routing.mc2_mask
        self._counter.count(index, _logical(layer, fused_experts_input.topk_ids), mask_T)

    def _index(self, owner: Any) -> int | None:
        """Return the index of a layer, which is its position in the first pass, a profile run.

        A draft model's layers run after the target model's, and have no index.

        Parameters
        ----------
        owner
            The layer, or in older releases its weights.
        """
        first = owner[0] if isinstance(owner, (list, tuple)) else owner
        key = int(first.data_ptr()) if isinstance(first, torch.Tensor) else id(first)
        if key not in self._indices and len(self._indices) < len(self._phy2log_LRS):
            self._indices[key] = len(self._indices)
        return self._indices.get(key)

    @harmless
    def replaced(self, layer: int, table_E: Any) -> None:
        """Record that dynamic EPLB has replaced a layer's experts.

        Parameters
        ----------
        layer
            Index of the layer.
        table_E
            This rank's new table, on the host.
        """
        if layer == 0 or self._new_maps_LRE is None:
            # The planner's process has written the maps of all layers before the first one is replaced.
            self._new_maps_LRE = np.asarray(self._runner.eplb_updator.shared_dict["expert_maps"])
        self._phy2log_LRS = self._phy2log_LRS.copy()
        self._phy2log_LRS[layer] = slots_of_maps(self._new_maps_LRE[layer : layer + 1])[0]
        if table_E is not None and self._table_LE is not None:
            self._table_LE = self._table_LE.copy()
            self._table_LE[layer] = np.asarray(table_E)
        self.observer.placed(self._layout)


def _logical(layer: Any, ids_TK: torch.Tensor) -> torch.Tensor:
    """Return the logical experts that tokens chose. Release 0.30 has already mapped them to physical ones."""
    if layer is None or layer.log2phy is None:
        return ids_TK
    table_E = layer.log2phy.long()
    phy2log_P = ids_TK.new_zeros(int(layer.global_num_experts))
    phy2log_P.scatter_(0, table_E, torch.arange(len(table_E), dtype=ids_TK.dtype, device=ids_TK.device))
    return phy2log_P[ids_TK.long()]


def _layers_of(model: Any) -> list[Any]:
    """Return the model's MoE layers, in order. Raises ``NotObservedError`` if it has none."""
    layers = [module for module in model.modules() if hasattr(module, "global_redundant_expert_num")]
    if not layers:
        raise NotObservedError("vLLM-Ascend finds no MoE layers in this model")
    return layers
