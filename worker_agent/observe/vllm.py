"""Observe mode in vLLM: counts the routers' choices, with or without vLLM's EPLB, which keeps running.

Hooks run around the worker's methods that load the model and run a batch, at the point where every router has chosen
logical experts, and after vLLM's EPLB has committed a new map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch

from eplb_core.placement import Int32
from worker_agent.adapters.batch import Batch, batch_of, share_of_rank, step_of
from worker_agent.adapters.compat import Patches, UnsupportedEngineError, mismatches, nearest, read_known
from worker_agent.adapters.vllm.host import dispatch_of, token_group
from worker_agent.observe.counter import RouterCounter
from worker_agent.observe.layout import ObservedLayout, linear
from worker_agent.observe.observer import (
    NotObservedError,
    Observer,
    Ranks,
    harmless,
    log,
    meet,
    not_observed,
    without_expert_parallelism,
)

_WORKER = "vllm.v1.worker.gpu_worker:Worker"
PATCHES: Patches = {
    "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._apply_eplb_mapping": 2,
    f"{_WORKER}.execute_model": 2,
    f"{_WORKER}.load_model": 1,
    f"{_WORKER}.compile_or_warm_up_model": 1,
}
"""Hooked functions that ``known.json`` has, with the number of leading parameters that the hooks declare."""


def install() -> None:
    """Add the hooks. If they do not fit this release of vLLM, say so and change nothing."""
    import vllm

    known = read_known("worker_agent.adapters.vllm")
    functions = known[nearest(vllm.__version__, known)]
    hooked = {target: functions[target] for target in PATCHES}
    fatal = [mismatch.target for mismatch in mismatches(hooked, PATCHES) if mismatch.fatal]
    if fatal:
        not_observed(f"the hooks do not fit {', '.join(fatal)} of vLLM {vllm.__version__}; use a newer agent")
        return
    _count_choices()
    _follow_commits()
    _watch_worker()


def _count_choices() -> None:
    """Count choices where routers map them to physical experts, which every router does, even without EPLB.

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
    """Note each map that vLLM's EPLB commits, as a whole or layer by layer. The maps are on the host."""
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


def _watch_worker() -> None:
    """Start observing once the model is loaded, and call the observation around each batch outside the warm-up."""
    from vllm.v1.worker.gpu_worker import Worker

    def hook(name: str, call_around: Callable[..., Any]) -> None:
        original = getattr(Worker, name)

        @wraps(original)
        def hooked(self: Any, *arguments: Any, **named: Any) -> Any:
            return call_around(original, self, *arguments, **named)

        setattr(Worker, name, hooked)

    def load_model(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
        result = original(worker, *arguments, **named)
        worker.eplb_observation = observe(worker)
        return result

    def warm_up(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
        # vLLM's second model runner warms up with batches of its own.
        observation = worker.eplb_observation
        worker.eplb_observation = None
        try:
            return original(worker, *arguments, **named)
        finally:
            worker.eplb_observation = observation

    def execute_model(
        original: Callable[..., Any], worker: Any, scheduler_output: Any, *rest: Any, **named: Any
    ) -> Any:
        observation = worker.eplb_observation
        if observation is None:
            return original(worker, scheduler_output, *rest, **named)
        observation.before(scheduler_output)
        result = original(worker, scheduler_output, *rest, **named)
        observation.after()
        return result

    def execute_dummy_batch(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
        observation = worker.eplb_observation
        if observation is not None:
            observation.before_dummy()
        result = original(worker, *arguments, **named)
        if observation is not None:
            observation.after()
        return result

    Worker.eplb_observation = None
    for name, call_around in {
        "load_model": load_model,
        "compile_or_warm_up_model": warm_up,
        "execute_model": execute_model,
        "execute_dummy_batch": execute_dummy_batch,
    }.items():
        hook(name, call_around)


@dataclass(frozen=True)
class _Model:
    """The target model's MoE layers.

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
        found = [
            module
            for module in runner.get_model().modules()
            if isinstance(getattr(module, "router", None), BaseRouter)
        ]
        # In some releases, a layer and its runner share a router.
        layers = list({id(module.router): module for module in reversed(found)}.values())[::-1]
        if not layers:
            raise NotObservedError(
                "vLLM's routers choose no experts in this model; its MoE layers, if any, route otherwise"
            )
        for state in getattr(getattr(runner, "eplb_state", None), "model_states", {}).values():
            balanced = list(state.model.moe_layers)
            if balanced and balanced[0].router in [layer.router for layer in layers]:
                experts = int(state.logical_replica_count.shape[1])
                return cls(balanced, experts, state.physical_to_logical_map.device, state)
        sizes = {int(layer.router.global_num_experts) for layer in layers}
        if len(sizes) > 1:
            raise NotObservedError(f"its MoE layers have different numbers of experts ({sorted(sizes)})")
        return cls(layers, sizes.pop(), torch.device(runner.device))

    def local_experts(self) -> list[list[int]] | None:
        """Return the logical experts of each layer's local slots, or ``None`` if experts are not divided by ranks."""
        rows = []
        for layer in self.layers:
            expert_map = getattr(getattr(layer, "routed_experts", layer), "_expert_map", None)
            if expert_map is None:
                return None
            local_E = expert_map.cpu().numpy()[: self.experts]
            held = np.flatnonzero(local_E >= 0)
            rows.append(held[np.argsort(local_E[held])].tolist())
        return rows


def observe(worker: Any) -> VllmObservation | None:
    """Start observing a worker's model (collective over the EP group), or say why it cannot be observed."""
    config = worker.vllm_config
    try:
        if config.parallel_config.pipeline_parallel_size > 1:
            raise NotObservedError("with pipeline parallelism, no rank sees all layers")
        model = _Model.of(worker)
        if any(dispatch_of(layer).monolithic for layer in model.layers):
            raise NotObservedError(
                "its experts route inside their kernel, where nothing can count; choose another MoE backend"
            )
        return VllmObservation(model, config)
    except NotObservedError as error:
        reason = str(error)
    except UnsupportedEngineError as error:
        reason = f"{error.subject}. {error.reason}"
    except Exception:
        log.exception("rank %d: eplb-agent could not begin to observe this engine", worker.rank)
        reason = "see the error above"
    if worker.rank == 0:
        not_observed(reason)
    return None


class VllmObservation:
    """Observation of one rank's target model.

    Parameters
    ----------
    model
        The model's MoE layers.
    config
        vLLM's ``VllmConfig``.

    Attributes
    ----------
    observer
        This rank's observer.
    """

    def __init__(self, model: _Model, config: Any) -> None:
        from vllm.distributed.parallel_state import get_ep_group

        group = get_ep_group()
        rank, size = int(group.rank_in_group), int(group.world_size)
        parallel = config.parallel_config
        dispatch = dispatch_of(model.layers[0])
        tokens = token_group(model.layers, parallel, rank, size)
        self._gathers = dispatch.naive
        local = model.local_experts() if model.state is None else None
        ranks, slots = meet(local, tokens.number, group.cpu_group)
        self._phy2log_LRS, note = _placement_of(model, slots)
        self._experts = model.experts
        self._share = None
        if parallel.data_parallel_size == 1 or not self._gathers:
            self._share = share_of_rank(rank, size // parallel.data_parallel_size, tokens.number is not None)
        self._ranks: Ranks = ranks
        removes_padding = not (self._gathers or dispatch.sequence_parallel)
        self._counter = RouterCounter(
            len(model.layers), model.experts, model.device, _max_rows(config) if removes_padding else 0
        )
        self._batch: Batch | None = None
        self._is_dummy = False
        self._runs = False
        self.observer = Observer.start(self._counter.rings, self._layout, ranks, "vLLM", note)
        for index, layer in enumerate(model.layers):
            layer.router.eplb_observed_layer = (self, index)
        if model.state is not None:
            model.state.eplb_observation = self

    @property
    def _layout(self) -> ObservedLayout:
        return ObservedLayout(self._phy2log_LRS, self._experts)

    @property
    def stopped(self) -> bool:
        """True once an error has ended the observation."""
        return self.observer.stopped

    def stop(self, error: Exception) -> None:
        """End the observation because of an error."""
        self.observer.stop(error)

    @harmless
    def count(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Count the choices of a layer's router."""
        if self._ranks.counts:
            self._counter.count(layer, topk_ids)
        else:
            self._counter.rings.layer_runs(layer, len(self._phy2log_LRS))

    @harmless
    def before(self, scheduler_output: Any) -> None:
        """Prepare for the batch that is about to run."""
        self._batch = batch_of(scheduler_output)
        self._is_dummy = False
        self._runs = self._batch is not None
        self._prepare(0 if self._batch is None else self._batch.tokens)

    @harmless
    def before_dummy(self) -> None:
        """Prepare for a pass in which this rank has no tokens."""
        self._batch = None
        self._is_dummy = True
        self._runs = True
        self._prepare(0)

    def _prepare(self, tokens: int) -> None:
        if self._runs:
            self.observer.before_pass()
            self._counter.expect(tokens)

    @harmless
    def after(self) -> None:
        """Record the pass that has just been queued, if there was one."""
        if not self._runs:
            return
        self._runs = False
        # A rank without tokens may still count those of other ranks, which are gathered before routing.
        self._counter.record(counts=self._ranks.counts and (self._gathers or not self._is_dummy))
        self.observer.after_pass(*step_of(self._batch, self._share, is_dummy=self._is_dummy))

    @harmless
    def moved(self, layers: slice, phy2log: torch.Tensor) -> None:
        """Note a map that vLLM's EPLB has committed.

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
        Logical experts of each rank's local slots, by layer; ``None`` if experts are not divided by ranks.
    """
    layers, size = len(model.layers), len(slots)
    if model.state is not None:
        phy2log_LP = model.state.physical_to_logical_map.cpu().numpy().astype(np.int32)
        return phy2log_LP.reshape(layers, size, -1), "vLLM's own EPLB keeps balancing"
    if size == 1:
        return linear(layers, model.experts, 1), "With one rank, there is no imbalance"
    if any(rank_slots is None for rank_slots in slots):
        note = f"Without expert parallelism, the imbalance is what expert parallelism over the same {size} ranks would have"
        return linear(layers, model.experts, size), note
    rows = [rank_slots for rank_slots in slots if rank_slots is not None]
    most = max(len(experts) for rank_slots in rows for experts in rank_slots)
    phy2log_LRS = np.full((layers, size, most), -1, dtype=np.int32)
    for rank, rank_slots in enumerate(rows):
        for layer, experts in enumerate(rank_slots):
            phy2log_LRS[layer, rank, : len(experts)] = experts
    return phy2log_LRS, ""


def _max_rows(config: Any) -> int:
    """Return the largest number of rows in a batch, including the padding of captured graphs."""
    captured = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
    return max(int(config.scheduler_config.max_num_batched_tokens), int(captured))
