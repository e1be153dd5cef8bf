"""The per-step split in vLLM: its routers map choices to replicas according to the current pass's counts.

All of vLLM's layers map their choices in ``BaseRouter._apply_eplb_mapping``, inside the graph that vLLM captures. In
place of vLLM's kernel, the split chooses the replicas, and records loads for vLLM's EPLB as that kernel does.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch

from worker_agent.adapters.compat import UnsupportedEngineError, refuse
from worker_agent.adapters.engine_host import log
from worker_agent.adapters.vllm.dispatch import dispatch_of, token_group
from worker_agent.step_split import (
    SplitChoice,
    StepSplit,
    StepSplitSetting,
    choose_split,
    is_requested,
    ranks_agree,
)

_NEW_MAP = "new_physical_to_logical_map"


class _EpRanks:
    """The EP ranks, which exchange counts over vLLM's own coordinator, so that graphs capture the exchange."""

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self._group = group

    def all_gather(self, rows_TX: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._group.all_gather(rows_TX, dim=0)
        return gathered


def check_functions() -> None:
    """Raise ``UnsupportedEngineError`` if a function's parameters differ from those in 0.23 to 0.33."""
    import vllm
    from vllm.distributed.eplb import eplb_state
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    for owner, name, expected in (
        (BaseRouter, "_apply_eplb_mapping", ("self", "topk_ids")),
        (eplb_state, "_commit_eplb_maps", ("model_state", _NEW_MAP)),
        (eplb_state, "_commit_eplb_maps_for_layer", ("model_state", _NEW_MAP, "layer")),
    ):
        function = getattr(owner, name, None)
        actual = tuple(inspect.signature(function).parameters) if function is not None else ()
        refuse(
            [
                (
                    actual != expected,
                    f"the step split in vLLM {vllm.__version__}",
                    f"{name} takes ({', '.join(actual)}) instead of ({', '.join(expected)})",
                    "Set EPLB_AGENT_STEP_SPLIT=off",
                )
            ]
        )


def patch_router() -> None:
    """Make vLLM's routers use their layer's split, if it has one. Repeated calls have no effect."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    if hasattr(BaseRouter, "eplb_agent_split"):
        return
    map_choices = BaseRouter._apply_eplb_mapping

    @wraps(map_choices)
    def map_choices_by_step(self: Any, topk_ids: torch.Tensor) -> torch.Tensor:
        split: RouterSplit | None = self.eplb_agent_split
        if split is None or self.eplb_state is None or not split.applies(topk_ids.shape[0]):
            mapped: torch.Tensor = map_choices(self, topk_ids)
            return mapped
        return split.map_and_record(self.eplb_state, topk_ids)

    BaseRouter.eplb_agent_split = None
    BaseRouter._apply_eplb_mapping = map_choices_by_step


class RouterSplit(StepSplit):
    """Per-step split of one of vLLM's layers. See ``StepSplit`` for the parameters.

    Attributes
    ----------
    ignores_padding
        True if all ranks know the same number of real rows. After vLLM's naive dispatcher, a batch consists of all
        ranks' rows, and each rank knows only the number of its own real rows.
    """

    ignores_padding = True

    def map_and_record(self, state: Any, topk_ids: torch.Tensor) -> torch.Tensor:
        """Return the physical experts of all choices, and add the real tokens' choices to vLLM's load counts.

        Parameters
        ----------
        state
            vLLM's ``EplbLayerState``.
        topk_ids
            Logical experts ``[T, K]``.
        """
        if topk_ids.numel() == 0 and self._group is None:
            return topk_ids
        real_rows = _real_rows(state)
        physical_TK, counted_TK = self.physical(topk_ids, real_rows if self.ignores_padding else None)
        if real_rows is not None and not self.ignores_padding:
            row_T1 = torch.arange(topk_ids.shape[0], device=topk_ids.device).unsqueeze(1)
            counted_TK = counted_TK & (row_T1 < real_rows)
        load_P = state.expert_load_view
        counts_N = (counted_TK & state.should_record_tensor).reshape(-1).to(load_P.dtype)
        load_P.index_add_(0, physical_TK.clamp(min=0).reshape(-1).long(), counts_N)
        return physical_TK.to(topk_ids.dtype)


def _real_rows(state: Any) -> torch.Tensor | None:
    """Return the number of rows in the current (micro-)batch, excluding padding; ``None`` before release 0.25."""
    tensors = getattr(state, "num_unpadded_tokens_tensors", None)
    if tensors is None:
        return None
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id

    real: torch.Tensor = tensors[dbo_current_ubatch_id()]
    return real


def choose_for_model(
    model_state: Any,
    parallel_config: Any,
    group: Any,
    setting: StepSplitSetting,
    *,
    no_exchange: str | None = None,
) -> SplitChoice:
    """Decide whether vLLM splits a model's passes per step.

    Parameters
    ----------
    model_state
        vLLM's ``EplbModelState``.
    parallel_config
        vLLM's ``ParallelConfig``.
    group
        vLLM's coordinator for the EP group.
    setting
        The setting ``step_split``.
    no_exchange
        Reason why ranks with different tokens must not exchange their counts.
    """
    device_type = model_state.physical_to_logical_map.device.type
    if not is_requested(setting):
        return choose_split(setting, sees_all=False, device_type=device_type)
    layers = model_state.model.moe_layers
    obstacle = None
    sees_all = False
    if getattr(parallel_config, "enable_elastic_ep", False):
        obstacle = "elastic expert parallelism changes the number of slots"
    try:
        tokens = token_group(layers, parallel_config, group.rank_in_group, group.world_size)
        sees_all = tokens.covers(parallel_config.data_parallel_size, naive=dispatch_of(layers[0]).naive)
        if tokens.number is not None and not sees_all:
            no_exchange = "some ranks see the same tokens and others see different ones"
    except UnsupportedEngineError as error:
        obstacle = obstacle or str(error)
    if getattr(parallel_config, "num_ubatches", 0) > 1:
        no_exchange = (
            no_exchange
            or "micro-batches that overlap could exchange their counts in a different order on each rank"
        )
    return choose_split(
        setting, sees_all=sees_all, device_type=device_type, obstacle=obstacle, no_exchange=no_exchange
    )


def start_splits(model_state: Any, group: Any, choice: SplitChoice) -> list[RouterSplit]:
    """Give each layer's router a split for the model's current placement (collective over the EP group).

    Parameters
    ----------
    model_state, group
        As for ``choose_for_model``.
    choice
        Result of ``choose_for_model``, which is logged on the first rank.

    Returns
    -------
    list of RouterSplit
        Split of each layer; empty if the choice is off, or if the ranks compute different splits.
    """
    splits: list[RouterSplit] = []
    if choice.is_on:
        placed_LP = model_state.physical_to_logical_map.cpu().numpy()
        placed_LRS = placed_LP.reshape(len(placed_LP), group.world_size, -1)
        device = model_state.physical_to_logical_map.device
        experts = model_state.logical_replica_count.shape[1]
        exchanging = _EpRanks(group) if choice.exchanges else None
        least = choice.least_tokens or 1
        splits = [
            RouterSplit(placed_RS, experts, device, least_tokens=least, group=exchanging)
            for placed_RS in placed_LRS
        ]
        if exchanging is None and not ranks_agree(splits[0], experts, device, group.cpu_group):
            choice = SplitChoice(None, False, "the ranks computed different splits for the same choices")
            splits = []
    for split, layer in zip(splits, model_state.model.moe_layers, strict=False):
        split.ignores_padding = not dispatch_of(layer).naive
        layer.router.eplb_agent_split = split
    if group.rank_in_group == 0:
        log.info("%s", choice)
    return splits


def follow_commits(splits_of: dict[int, list[RouterSplit]]) -> None:
    """Patch vLLM's own commits, so that they also install the placement in the splits.

    Synchronous EPLB commits all layers at once, asynchronous EPLB one by one, both on the thread that queues passes.

    Parameters
    ----------
    splits_of
        Splits of each model, keyed by the id of its ``EplbModelState``.
    """
    from vllm.distributed.eplb import eplb_state

    commit = eplb_state._commit_eplb_maps
    commit_layer = eplb_state._commit_eplb_maps_for_layer

    @wraps(commit)
    def commit_and_install(model_state: Any, new_physical_to_logical_map: torch.Tensor) -> None:
        commit(model_state, new_physical_to_logical_map)
        splits = splits_of.get(id(model_state))
        if splits:
            new_LP = new_physical_to_logical_map.cpu().numpy()
            for split, new_P in zip(splits, new_LP, strict=True):
                split.install(new_P)

    @wraps(commit_layer)
    def commit_layer_and_install(
        model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int
    ) -> None:
        commit_layer(model_state, new_physical_to_logical_map, layer)
        splits = splits_of.get(id(model_state))
        if splits:
            splits[layer].install(new_physical_to_logical_map.cpu().numpy())

    eplb_state._commit_eplb_maps = commit_and_install
    eplb_state._commit_eplb_maps_for_layer = commit_layer_and_install
