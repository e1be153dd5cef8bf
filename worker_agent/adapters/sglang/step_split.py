"""The per-step split in SGLang: choices are mapped to replicas according to the current pass's counts.

Three functions are hooked. Two map the choices of a layer, and the third knows which rows are padding, which SGLang
masks only after the mapping. SGLang's recorder counts the mapped choices, so it needs no hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.adapters.compat import refuse
from worker_agent.adapters.engine_host import log
from worker_agent.step_split import (
    SplitChoice,
    StepSplit,
    StepSplitSetting,
    choose_split,
    is_requested,
    ranks_agree,
)

_DISPATCH = "sglang.srt.eplb.expert_location_dispatch"
_MAPPERS = ("_topk_ids_logical_to_physical_static", "_topk_ids_logical_to_physical_dynamic")
_TOPK = "sglang.srt.layers.moe.topk"
_AFTER_TOPK = "_post_process_topk_ids"
_REAL_ROWS = "num_token_non_padded"
_INFO = "expert_location_dispatch_info"

_splits: dict[int, StepSplit] = {}
"""Split of each layer of this process's model, keyed by the address of its row in SGLang's replica table."""


def register_hooks(setting: StepSplitSetting) -> None:
    """Register the hooks with SGLang's registry if the split is requested.

    Raises ``UnsupportedEngineError`` if SGLang's functions differ from those of releases 0.5.21 to 0.5.23.
    """
    if not is_requested(setting):
        return
    from sglang.srt.eplb import expert_location_dispatch
    from sglang.srt.layers.moe import topk
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _check(expert_location_dispatch, _MAPPERS, ("topk_ids", "info"))
    _check(topk, (_AFTER_TOPK,), (_REAL_ROWS, _INFO))
    for name in _MAPPERS:
        HookRegistry.register(f"{_DISPATCH}.{name}", _map_by_step, HookType.AROUND)
    HookRegistry.register(f"{_TOPK}.{_AFTER_TOPK}", _note_real_rows, HookType.AROUND)


def _check(module: Any, names: Iterable[str], parameters: tuple[str, ...]) -> None:
    for name in names:
        function = getattr(module, name, None)
        actual = tuple(inspect.signature(function).parameters) if function is not None else ()
        missing = [parameter for parameter in parameters if parameter not in actual]
        refuse(
            [
                (
                    bool(missing),
                    "the step split in this SGLang release",
                    f"{name} does not take {', '.join(missing)}",
                    "Set EPLB_AGENT_STEP_SPLIT=off",
                )
            ]
        )


def _note_real_rows(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Store the number of real rows with the layer's dispatch information."""
    if _splits:
        given = _signature(original).bind(*arguments, **keywords).arguments
        info = given.get(_INFO)
        if info is not None:
            info.eplb_agent_real_rows = given.get(_REAL_ROWS)
    return original(*arguments, **keywords)


@lru_cache(maxsize=4)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _mapped_by_step(original: Callable[..., Any], topk_ids: torch.Tensor, info: Any) -> Any:
    """Map a layer's choices with its split, or with ``original`` if it has none."""
    split = _splits.get(info.partial_logical_to_all_physical_map.data_ptr()) if info is not None else None
    if split is None or not topk_ids.numel() or not split.applies(topk_ids.shape[0]):
        return original(topk_ids, info)
    physical_TK, _ = split.physical(topk_ids, getattr(info, "eplb_agent_real_rows", None))
    return physical_TK.to(topk_ids.dtype)


# SGLang compiles a caller of the mapping. The split runs outside the compiled code.
_map_by_step: Callable[..., Any] = torch.compiler.disable(_mapped_by_step)


def _hooks_are_applied() -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = {*(f"{_DISPATCH}.{name}" for name in _MAPPERS), f"{_TOPK}.{_AFTER_TOPK}"}
    return bool(targets <= HookRegistry._patched)


def choose_for_engine(setting: StepSplitSetting, device_type: str) -> SplitChoice:
    """Decide from SGLang's published configuration whether it splits passes per step."""
    if not is_requested(setting):
        return choose_split(setting, sees_all=False, device_type=device_type)
    from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks
    from sglang.srt.runtime_context import get_exec, get_parallel

    moe = get_exec().moe
    obstacle = None
    if moe.ep_dispatch_algorithm not in ("static", "dynamic"):
        obstacle = f"--ep-dispatch-algorithm {moe.ep_dispatch_algorithm} chooses replicas itself"
    elif moe.elastic_ep_backend is not None:
        obstacle = "elastic expert parallelism changes the number of slots"
    elif get_parallel().attn_dp_size > 1:
        obstacle = "with attention data parallelism, ranks do not know which rows of a batch are padding"
    sees_all = moe.moe_a2a_backend == "none" and not is_moe_input_scattered_across_dp_ranks()
    return choose_split(
        setting,
        sees_all=sees_all,
        device_type=device_type,
        obstacle=obstacle,
        no_exchange="ranks without tokens do not route, so they could not exchange their counts",
    )


def start_splits(
    metadata: Any, layer_ids: Iterable[int], group: dist.ProcessGroup, choice: SplitChoice
) -> list[StepSplit]:
    """Give each layer a split for the current placement (collective over ``group``).

    Parameters
    ----------
    metadata
        SGLang's ``ExpertLocationMetadata``.
    layer_ids
        Rows of SGLang's tables that belong to MoE layers.
    group
        Process group of the EP ranks, for CPU tensors.
    choice
        Result of ``choose_for_engine``, which is logged on the first rank.

    Returns
    -------
    list of StepSplit
        Split of each layer; empty if the choice is off, if SGLang did not apply the hooks, or if the ranks do not split
        in the same way.
    """
    _splits.clear()
    splits: list[StepSplit] = []
    if choice.is_on and not _hooks_are_applied():
        choice = SplitChoice(
            None, False, "SGLang did not apply its hooks; see 'Failed to apply hooks' in its log"
        )
    if choice.is_on:
        device = metadata.physical_to_logical_map.device
        experts = int(metadata.num_logical_experts)
        slots = int(metadata.num_local_physical_experts)
        placed_LP = metadata.physical_to_logical_map_cpu.numpy()
        rows = list(layer_ids)
        splits = [
            StepSplit(
                placed_LP[row].reshape(-1, slots), experts, device, least_tokens=choice.least_tokens or 1
            )
            for row in rows
        ]
        if ranks_agree(splits[0], experts, device, group):
            addresses = (metadata.logical_to_all_physical_map[row].data_ptr() for row in rows)
            _splits.update(zip(addresses, splits, strict=True))
        else:
            choice = SplitChoice(None, False, "the ranks computed different splits for the same choices")
            splits = []
    if dist.get_rank(group) == 0:
        log.info("%s", choice)
    return splits
