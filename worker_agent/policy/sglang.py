"""Policy mode in SGLang: the planner decides in place of SGLang's EPLB algorithms."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.planner.settings import EVEN, STEP, TABLES
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import step_split
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.figures import Int64
from worker_agent.policy.parts import parts_of_window, without_copies
from worker_agent.policy.service import service_decision
from worker_agent.policy.vllm import require_planner
from worker_agent.settings import AgentSettings
from worker_agent.step_split import StepSplit

_log = logging.getLogger("eplb.agent")

_ALGORITHM = "sglang.srt.eplb.eplb_algorithms.rebalance_experts"
_MANAGER = "sglang.srt.eplb.eplb_manager.EPLBManager.__init__"
_PARAMETERS = (
    "tokens_per_expert",
    "num_physical_experts",
    "num_local_physical_experts",
    "num_groups",
    "num_nodes",
    "algorithm",
)
"""Parameters of ``rebalance_experts`` in SGLang 0.5.21 to 0.5.23."""

_UPDATE = "sglang.srt.eplb.expert_location.ExpertLocationMetadata.update"

_splits: list[StepSplit] = []
"""Per-step split of each layer; empty if SGLang chooses replicas from its tables."""
_FAULTY_RELEASES = ("0.5.21", "0.5.22")
"""Releases whose own EPLB produces wrong output for most models, unless an all-to-all backend is used."""

_agreements: list[Agreement] = []
"""Agreement of the EP ranks, created with SGLang's EPLB manager; empty if SGLang decides."""


def install() -> None:
    """Register the hooks. SGLang applies them after it has called all plugins.

    Raises
    ------
    UnsupportedEngineError
        If this SGLang has a different interface, or if the planner is not installed. In either case, nothing is
        registered.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_interface()
    HookRegistry.register(_ALGORITHM, rebalance_experts, HookType.AROUND)
    HookRegistry.register(_MANAGER, _join, HookType.AFTER)
    step_split.register_hooks(AgentSettings().step_split)
    HookRegistry.register(_UPDATE, _install, HookType.AFTER)


def _release() -> str:
    from sglang.version import __version__

    return str(__version__)


def check_interface() -> None:
    """Raise ``UnsupportedEngineError`` unless this SGLang has the known interface and the planner is installed."""
    from sglang.srt.eplb import eplb_algorithms

    actual = tuple(inspect.signature(eplb_algorithms.rebalance_experts).parameters)
    if actual != _PARAMETERS:
        raise UnsupportedEngineError(
            f"SGLang {_release()}",
            f"Its EPLB algorithms take ({', '.join(actual)}) instead of ({', '.join(_PARAMETERS)})",
            "Install SGLang 0.5.21 to 0.5.23 or a newer agent",
        )
    require_planner()


def _join(*_: Any, **__: Any) -> None:
    """Create the agreement of the EP ranks when SGLang creates its EPLB manager."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_exec, get_parallel

    # If SGLang cannot apply a hook, it only logs the failure.
    if _ALGORITHM not in HookRegistry._patched:
        raise UnsupportedEngineError(
            f"SGLang did not apply the hook to {_ALGORITHM}",
            "SGLang's own algorithm would decide",
            "See SGLang's log for 'Failed to apply hooks'",
        )
    if _release().startswith(_FAULTY_RELEASES) and get_exec().moe.moe_a2a_backend == "none":
        raise UnsupportedEngineError(
            f"SGLang {_release()} without an all-to-all backend",
            "In most models, this release uses expert numbers as slot numbers, so every move changes the model's "
            "output",
            "Install SGLang 0.5.23, or start with --moe-a2a-backend deepep",
        )
    if get_exec().moe.elastic_ep_backend is not None:
        _log.warning("elastic expert parallelism is enabled, so SGLang's own algorithm decides")
        return
    group = get_parallel().tp_group.cpu_group
    split = TABLES if get_exec().moe.ep_dispatch_algorithm == "static" else EVEN
    if _start_splits(group):
        split = STEP
    agreement = Agreement(group, split, service_decision(AgentSettings(), split))
    agreement.wait_until_warm()
    _agreements[:] = [agreement]


def _start_splits(group: dist.ProcessGroup) -> bool:
    """Split passes per step, if the settings and the dispatch permit it. Return True if all passes are split."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    _splits.clear()
    metadata = get_global_expert_location_metadata()
    if metadata is None:
        return False
    # The model is not loaded yet, so it is unknown which layers have experts.
    layers = range(len(metadata.physical_to_logical_map_cpu))
    choice = step_split.choose_for_engine(
        AgentSettings().step_split, metadata.physical_to_logical_map.device.type
    )
    _splits.extend(step_split.start_splits(metadata, layers, group, choice))
    return choice.whole and bool(_splits)


def _install(_: Any, metadata: Any, other: Any, update_layer_ids: list[int]) -> None:
    """Install the new placement in the splits after ``ExpertLocationMetadata.update`` has committed it."""
    del other
    for layer in update_layer_ids if _splits else ():
        _splits[layer].install(metadata.physical_to_logical_map_cpu[layer].numpy())


def rebalance_experts(
    original: Callable[..., Any],
    tokens_per_expert: torch.Tensor,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decide in place of ``original``, SGLang's ``rebalance_experts``, on all ranks.

    Parameters
    ----------
    original
        SGLang's function, which decides if the planner cannot.
    tokens_per_expert
        ``[T, L, E]``, tokens of each step, summed over all ranks.
    num_physical_experts, num_local_physical_experts, num_groups, num_nodes, algorithm
        As for SGLang's function.

    Returns
    -------
    phy2log, log2phy, count : torch.Tensor
        int64 ``[L, P]``, ``[L, E, X]`` padded with -1, and ``[L, E]``, on the device of ``tokens_per_expert``.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    def by_sglang() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        maps: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = original(
            tokens_per_expert=tokens_per_expert,
            num_physical_experts=num_physical_experts,
            num_local_physical_experts=num_local_physical_experts,
            num_groups=num_groups,
            num_nodes=num_nodes,
            algorithm=algorithm,
        )
        return maps

    metadata = get_global_expert_location_metadata()
    if not _agreements or metadata is None or not bool(tokens_per_expert.any()):
        return by_sglang()
    old_LP = metadata.physical_to_logical_map_cpu.numpy().astype(np.int64)
    if old_LP.shape != (tokens_per_expert.shape[1], num_physical_experts) or (old_LP < 0).any():
        return by_sglang()
    ranks = num_physical_experts // num_local_physical_experts
    parts_NLE = parts_of_window(tokens_per_expert.long(), AgentSettings().window_parts).cpu().numpy()
    new_LP = _agreements[0].placement(without_copies(parts_NLE, ranks), old_LP, ranks, nodes=num_nodes)
    if new_LP is None:
        return by_sglang()
    device = tokens_per_expert.device
    log2phy_LEX, count_LE = slots_of_experts(new_LP, tokens_per_expert.shape[2])
    return (
        torch.from_numpy(new_LP.copy()).to(device),
        torch.from_numpy(log2phy_LEX).to(device),
        torch.from_numpy(count_LE).to(device),
    )


def slots_of_experts(phy2log_LP: Int64, experts: int) -> tuple[Int64, Int64]:
    """Return the physical slots of each expert, int64 ``[L, E, X]`` padded with -1, and their number, int64 ``[L, E]``.

    Examples
    --------
    >>> slots, count = slots_of_experts(np.array([[0, 1, 0]]), experts=2)
    >>> slots.tolist(), count.tolist()
    ([[[0, 2], [1, -1]]], [[2, 1]])
    """
    count_LE = np.stack([np.bincount(slots_P, minlength=experts) for slots_P in phy2log_LP]).astype(np.int64)
    slots_LEX = np.full((*count_LE.shape, int(count_LE.max())), -1, dtype=np.int64)
    for layer, slots_P in enumerate(phy2log_LP):
        order_P = np.argsort(slots_P, kind="stable")
        expert_P = slots_P[order_P]
        first_E = np.cumsum(count_LE[layer]) - count_LE[layer]
        slots_LEX[layer, expert_P, np.arange(expert_P.size) - first_E[expert_P]] = order_P
    return slots_LEX, count_LE
