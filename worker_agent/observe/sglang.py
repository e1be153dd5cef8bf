"""Observe mode in SGLang: counts the chosen experts, with or without SGLang's EPLB, which keeps running.

Hooks run after a model is loaded, around each forward pass, at the point where each layer has chosen logical experts,
and after SGLang's EPLB has changed the locations of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang.host import phase_of, refuse_routing_kernels
from worker_agent.observe.counter import RouterCounter
from worker_agent.observe.layout import ObservedLayout, linear
from worker_agent.observe.observer import (
    NotObservedError,
    Observer,
    harmless,
    log,
    meet,
    not_observed,
    without_expert_parallelism,
)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def install() -> None:
    """Register the hooks. SGLang applies them after it has called all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)


class SglangObservation:
    """Observation of one rank's target model.

    Parameters
    ----------
    runner
        SGLang's ``ModelRunner`` with the loaded model.

    Attributes
    ----------
    observer
        This rank's observer.
    """

    current: SglangObservation | None = None

    def __init__(self, runner: Any) -> None:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
        from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        layer_ids = _layer_ids(runner.model)
        metadata = get_global_expert_location_metadata()
        _check(runner.model, parallel, layer_ids, metadata)
        self._index = {layer_id: index for index, layer_id in enumerate(layer_ids)}
        self._metadata = metadata
        self._size = int(parallel.tp_size)
        self._divides_experts = int(parallel.moe_ep_size) > 1
        shares_tokens = not is_moe_input_scattered_across_dp_ranks()
        self._own_tables = not shares_tokens and metadata.logical_to_rank_dispatch_physical_map is not None
        self._knows_tokens = int(parallel.attn_dp_size) == 1 and shares_tokens
        group = parallel.tp_group.cpu_group if self._size > 1 else None
        self._ranks, _ = meet(None, 0 if shares_tokens else None, group)
        self._counter = RouterCounter(
            len(layer_ids), int(metadata.num_logical_experts), metadata.physical_to_logical_map.device
        )
        note = "" if self._divides_experts or self._size == 1 else without_expert_parallelism(self._size)
        self.observer = Observer.start(self._counter.rings, self._layout(), self._ranks, "SGLang", note)

    def _layout(self) -> ObservedLayout:
        """Return the layout that SGLang serves, read from its host copies."""
        metadata = self._metadata
        rows = list(self._index)
        experts = int(metadata.num_logical_experts)
        if not self._divides_experts:
            return ObservedLayout(linear(len(rows), experts, self._size), experts)
        phy2log_LP = metadata.physical_to_logical_map_cpu[rows].numpy().astype(np.int32)
        table_LE = None
        if self._own_tables:
            table_LE = metadata.logical_to_rank_dispatch_physical_map[rows].cpu().numpy().astype(np.int32)
        return ObservedLayout(phy2log_LP.reshape(len(rows), self._size, -1), experts, table_LE)

    @property
    def stopped(self) -> bool:
        """True once an error has ended the observation."""
        return self.observer.stopped

    def stop(self, error: Exception) -> None:
        """End the observation because of an error."""
        self.observer.stop(error)

    @harmless
    def count(
        self, layer_id: int, topk_ids: torch.Tensor, config: Any, real_tokens: torch.Tensor | None
    ) -> None:
        """Count the choices of a layer. Choices of fused shared experts come last and are not counted."""
        index = self._index.get(layer_id)
        if index is None or not self._ranks.counts:
            return
        shared = int(getattr(config, "num_shared_topk_slots", 0))
        if shared and topk_ids.shape[-1] == config.top_k:
            topk_ids = topk_ids[:, :-shared]
        is_real_T = None
        if real_tokens is not None:
            is_real_T = torch.arange(topk_ids.shape[0], device=topk_ids.device) < real_tokens
        self._counter.count_choices(index, topk_ids, is_real_T)

    @harmless
    def before(self) -> None:
        """Prepare for a forward pass, on its stream."""
        self.observer.before_pass()
        self._counter.expect(0)

    @harmless
    def count_pass(self) -> None:
        """Count a pass. The layers cannot do this, because a rank without tokens does not choose experts."""
        self._counter.count_pass()

    @harmless
    def after(self, forward_batch: Any) -> None:
        """Record the forward pass that has just been queued."""
        self._counter.record(counts=self._ranks.counts)
        tokens = forward_batch.global_num_token_non_padded_cpu if self._knows_tokens else None
        if tokens is not None and self._ranks.rank:
            tokens = 0
        self.observer.after_pass(phase_of(forward_batch.forward_mode), tokens)

    @harmless
    def moved(self, metadata: Any) -> None:
        """Record that SGLang's EPLB has changed ``metadata``."""
        if metadata is self._metadata:
            self.observer.placed(self._layout())


def _layer_ids(model: Any) -> list[int]:
    """Return the layer ids of the model's MoE layers, from the modules that choose experts."""
    return sorted(
        {
            int(module.layer_id)
            for module in model.modules()
            if hasattr(module, "topk_config") and getattr(module, "layer_id", None) is not None
        }
    )


def _check(model: Any, parallel: Any, layer_ids: list[int], metadata: Any) -> None:
    """Raise ``NotObservedError`` if the model cannot be observed."""
    try:
        refuse_routing_kernels(model)
    except UnsupportedEngineError as error:
        raise NotObservedError(f"{error.subject}, where choices cannot be counted") from error
    reasons = (
        (not layer_ids, "SGLang chooses no experts in this model"),
        (metadata is None, "SGLang does not know how many experts a model of this class has"),
        (int(parallel.pp_size) > 1, "with pipeline parallelism, no rank sees all layers"),
        (int(parallel.dp_size) > 1, "each data-parallel replica would need its own deployment"),
        (
            int(parallel.moe_ep_size) not in (1, int(parallel.tp_size)),
            f"--ep-size {parallel.moe_ep_size} with --tp-size {parallel.tp_size} splits each expert across "
            "ranks, or creates several expert-parallel groups",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise NotObservedError(reason)


def _observe(_: Any, runner: Any) -> None:
    """Start observing after ``initialize`` (collective over the TP group), or log why the engine cannot be observed."""
    if runner.is_draft_worker:
        return
    from sglang.srt.runtime_context import get_parallel

    try:
        SglangObservation.current = runner.eplb_observation = SglangObservation(runner)
        return
    except NotObservedError as error:
        reason = str(error)
    except Exception:
        log.exception("eplb-agent could not start observing this engine")
        reason = "see the error above"
    if int(get_parallel().tp_rank) == 0:
        not_observed(reason)


def _observation_of(runner: Any) -> SglangObservation | None:
    return getattr(runner, "eplb_observation", None)


def _count_choices(original: Callable[..., Any], topk_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """Count the choices before SGLang maps them to physical experts.

    While a compiler traces this function, it only calls the original, so the compiled code does not change.
    """
    observation = SglangObservation.current
    if observation is not None and not torch.compiler.is_compiling() and "layer_id" in named:
        observation.count(
            named["layer_id"], topk_ids, named.get("topk_config"), named.get("num_token_non_padded")
        )
    return original(topk_ids, *rest, **named)


def _count_named_choices(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Count choices that are passed by position or by name."""
    topk_ids = arguments[0] if arguments else named.pop("topk_ids")
    return _count_choices(original, topk_ids, *arguments[1:], **named)


def _around_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *rest: Any, **named: Any
) -> Any:
    observation = _observation_of(runner)
    if observation is None:
        return original(runner, forward_batch, *rest, **named)
    observation.before()
    output = original(runner, forward_batch, *rest, **named)
    observation.after(forward_batch)
    return output


def _count_pass(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Count the pass after ``_forward_raw``, which has queued the model's work on the same stream."""
    observation = _observation_of(runner)
    if observation is not None:
        observation.count_pass()


def _follow_update(_: Any, metadata: Any, *__: Any, **___: Any) -> None:
    observation = SglangObservation.current
    if observation is not None:
        observation.moved(metadata)


AROUND: dict[str, Callable[..., Any]] = {
    f"{_RUNNER}.forward": _around_forward,
    "sglang.srt.layers.moe.topk._post_process_topk_ids": _count_named_choices,
}
"""Hooks that wrap a function and call the original, by target."""
AFTER: dict[str, Callable[..., Any]] = {
    f"{_RUNNER}.initialize": _observe,
    f"{_RUNNER}._forward_raw": _count_pass,
    "sglang.srt.eplb.expert_location.ExpertLocationMetadata.update": _follow_update,
}
"""Hooks that run after a function, by target."""
