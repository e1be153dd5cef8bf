"""Adapters from other projects' balancers to this benchmark's ``Policy`` protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from eplb_lab.bench.decision import Decision, Int32, Policy, Scene
from eplb_lab.bench.peers.archives import (
    SGLANG,
    VLLM,
    VLLM_ASCEND,
    VLLM_ASCEND_NEXT,
    Package,
    import_from,
    stand_in,
)


class _FlashLB:
    """vLLM-Ascend's FlashLB with its factory's default settings."""

    def __init__(self) -> None:
        self._torch = _torch()
        # FlashLB reads the number of ranks, and uses different thresholds for 32 or more ranks.
        self._group = SimpleNamespace(world_size=0)
        stand_in("vllm.logger", {"logger": _quiet_logger()})
        stand_in("vllm_ascend.distributed.parallel_state", {"get_dynamic_eplb_group": None})
        module = import_from(VLLM_ASCEND, "policy_flashlb")
        module.get_dynamic_eplb_group = lambda: self._group  # type: ignore[attr-defined]
        self._policy = module.FlashLB()

    def decide(self, scene: Scene) -> Decision:
        """Make the decision from the heat per step and slot. FlashLB returns the list of layers that it changes."""
        self._group.world_size = scene.placement_LRS.shape[1]
        workload = self._torch.from_numpy(_by_slot(scene))
        current = self._torch.from_numpy(scene.placement_LRS.copy())
        result, cpu_seconds, wall_seconds = _timed(lambda: self._policy.rebalance_experts(current, workload))
        _, layers, new_LRS = result
        placed_LRS = scene.placement_LRS.copy()
        placed_LRS[layers] = new_LRS[layers]
        return _decision(scene, placed_LRS, cpu_seconds, wall_seconds)


class _AscendPolicy:
    """vLLM-Ascend's SwiftBalancer or default balancer. Both use the window's summed heat."""

    def __init__(self, module: str, name: str) -> None:
        self._torch = _torch()
        # SwiftBalancer imports torch_npu and reads the number of devices per host.
        self._torch.npu = SimpleNamespace(device_count=lambda: 8)
        stand_in("torch_npu", {})
        self._policy = getattr(import_from(VLLM_ASCEND, module), name)()

    def decide(self, scene: Scene) -> Decision:
        """Return the new placement even if the balancer does not consider the change worthwhile."""
        workload = self._torch.from_numpy(_by_slot(scene).sum(axis=0))
        current = self._torch.from_numpy(scene.placement_LRS.copy())
        result, cpu_seconds, wall_seconds = _timed(lambda: self._policy.rebalance_experts(current, workload))
        _, _, new_LRS = result
        return _decision(scene, np.asarray(new_LRS, dtype=np.int32), cpu_seconds, wall_seconds)


_STAIR = {
    "load_window_bins": 64,
    "z_score": NormalDist().inv_cdf(0.75),
    "relative_balance_threshold": 0.95,
    "absolute_balance_threshold": 0.9,
    "rank_transfer_limit": -1,
    "cross_node_transfer_limit": -1,
    "replica_search_num_stages": 4,
    "replica_search_radius": 8,
    "replica_search_beam_size": 64,
    "placement_search_backtrack_limit": 32,
}
"""Default settings of STAIR, repeated here because the module that declares them imports the whole engine."""


class _Stair:
    """vLLM-Ascend's STAIR, which changes a layer if its balance has become worse since the layer's last change."""

    def __init__(self) -> None:
        folder = VLLM_ASCEND_NEXT.folder.strip("/")
        contents = {"__path__": [str(VLLM_ASCEND_NEXT.root / folder)], "PreparedLoadStats": None}
        _torch()
        stand_in("vllm.distributed", {"__path__": [], "get_eplb_group": None})
        stand_in("vllm.distributed.eplb.policy", {"AbstractEplbPolicy": object})
        stand_in("vllm_ascend.ascend_config", {"StairConfig": None})
        stand_in(folder.replace("/", "."), contents)
        self._policy = import_from(VLLM_ASCEND_NEXT, "stair").StairEplbPolicy
        self._committed_L = np.zeros(0)

    def decide(self, scene: Scene) -> Decision:
        """Make the decision from the heat per step and expert, with all ranks on one node."""
        layers, ranks, _ = scene.placement_LRS.shape
        if self._committed_L.size != layers:
            self._committed_L = np.full(layers, np.nan)
        loads = scene.heat_TLE.astype(np.float64)
        placed_LRS = scene.placement_LRS.astype(np.int64)
        node_R = np.zeros(ranks, dtype=np.int64)
        settings = SimpleNamespace(**_STAIR)
        result, cpu_seconds, wall_seconds = _timed(
            lambda: self._policy.plan_rebalance(loads, placed_LRS, self._committed_L, node_R, settings)
        )
        predicted_L = result.predicted_mean_ratios
        self._committed_L = np.where(np.isnan(predicted_L), self._committed_L, predicted_L)
        return _decision(scene, np.asarray(result.rank_expert_ids, dtype=np.int32), cpu_seconds, wall_seconds)


class _VllmDefault:
    """vLLM's default balancer: DeepSeek's EPLB with one expert group and one node."""

    def __init__(self) -> None:
        self._torch = _torch()
        self._policy = import_from(VLLM, "default").DefaultEplbPolicy

    def decide(self, scene: Scene) -> Decision:
        """Make the decision from the window's summed heat."""
        layers, ranks, slots = scene.placement_LRS.shape
        weight = self._torch.from_numpy(scene.heat_TLE.sum(axis=0).astype(np.float32))
        current = self._torch.from_numpy(scene.placement_LRS.reshape(layers, -1).astype(np.int64))
        new_LP, cpu_seconds, wall_seconds = _timed(
            lambda: self._policy.rebalance_experts(weight, ranks * slots, 1, 1, ranks, current)
        )
        placed_LRS = np.asarray(new_LP, dtype=np.int32).reshape(layers, ranks, slots)
        return _decision(scene, placed_LRS, cpu_seconds, wall_seconds)


class _Sglang:
    """SGLang's two balancers without expert groups: DeepSeek's EPLB (``deepseek``) and its variant ``deepseek_vec``."""

    def __init__(self, module: str) -> None:
        self._torch = _torch()
        self._module = module
        self._policy = import_from(SGLANG, module)

    def decide(self, scene: Scene) -> Decision:
        """Make the decision from the summed heat for ``deepseek``, and from the heat per step for ``deepseek_vec``."""
        layers, ranks, slots = scene.placement_LRS.shape
        heat = self._torch.from_numpy(scene.heat_TLE.astype(np.float32))

        def rebalance() -> Any:
            if self._module == "deepseek":
                return self._policy.rebalance_experts(heat.sum(dim=0), ranks * slots, None, 1, ranks, False)
            return self._policy.rebalance_experts(heat, ranks * slots, slots, None, 1, False)

        result, cpu_seconds, wall_seconds = _timed(rebalance)
        new_LP, _, _ = result
        placed_LRS = np.asarray(new_LP, dtype=np.int32).reshape(layers, ranks, slots)
        return _decision(scene, placed_LRS, cpu_seconds, wall_seconds)


FLASHLB = "FlashLB"

PEERS: dict[str, tuple[Package, Callable[[], Policy]]] = {
    FLASHLB: (VLLM_ASCEND, _FlashLB),
    "STAIR": (VLLM_ASCEND_NEXT, _Stair),
    "Swift": (VLLM_ASCEND, lambda: _AscendPolicy("policy_swift_balancer", "SwiftBalanceEplb")),
    "Ascend default": (VLLM_ASCEND, lambda: _AscendPolicy("policy_default_eplb", "DefaultEplb")),
    "vLLM default": (VLLM, _VllmDefault),
    "SGLang deepseek": (SGLANG, lambda: _Sglang("deepseek")),
    "SGLang deepseek_vec": (SGLANG, lambda: _Sglang("deepseek_vec")),
}
"""Package and factory of each peer, by the peer's name in this project."""


def make(name: str) -> Policy:
    """Create the peer called ``name``."""
    return PEERS[name][1]()


def _torch() -> Any:
    import torch

    torch.set_num_threads(1)
    return torch


def _by_slot(scene: Scene) -> np.ndarray:
    """Return the heat of each slot if an expert's replicas get equal shares of its tokens, float64 ``[T, L, R, S]``."""
    steps, _, experts = scene.heat_TLE.shape
    by_slot = np.empty((steps, *scene.placement_LRS.shape))
    for layer, placed_RS in enumerate(scene.placement_LRS):
        replicas_E = np.bincount(placed_RS.ravel(), minlength=experts)
        by_slot[:, layer] = scene.heat_TLE[:, layer][:, placed_RS] / replicas_E[placed_RS]
    return by_slot


def _timed(rebalance: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call a balancer, and return its result and the call's CPU and wall-clock seconds."""
    cpu_start = time.process_time()
    wall_start = time.perf_counter()
    result = rebalance()
    return result, time.process_time() - cpu_start, time.perf_counter() - wall_start


def _decision(scene: Scene, placed_LRS: Int32, cpu_seconds: float, wall_seconds: float) -> Decision:
    changed = int((placed_LRS != scene.placement_LRS).any(axis=(1, 2)).sum())
    return Decision(placed_LRS, None, None, changed, cpu_seconds, wall_seconds)


def _quiet_logger() -> logging.Logger:
    """Return a logger that discards the peers' messages."""
    logger = logging.getLogger("peers")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
