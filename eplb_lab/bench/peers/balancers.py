"""Other people's balancers under this benchmark's calling convention."""

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
    """vLLM-Ascend's FlashLB, as its factory makes it."""

    def __init__(self) -> None:
        self._torch = _torch()
        # It asks how many ranks there are and takes other thresholds from 32 on.
        self._group = SimpleNamespace(world_size=0)
        stand_in("vllm.logger", {"logger": _quiet_logger()})
        stand_in("vllm_ascend.distributed.parallel_state", {"get_dynamic_eplb_group": None})
        module = import_from(VLLM_ASCEND, "policy_flashlb")
        module.get_dynamic_eplb_group = lambda: self._group  # type: ignore[attr-defined]
        self._policy = module.FlashLB()

    def decide(self, scene: Scene) -> Decision:
        """Takes the window step by step and slot by slot, and names the layers that it changes."""
        self._group.world_size = scene.placement_LRS.shape[1]
        workload = self._torch.from_numpy(_by_slot(scene))
        now = self._torch.from_numpy(scene.placement_LRS.copy())
        (_, chosen, found), cpu, wall = _timed(lambda: self._policy.rebalance_experts(now, workload))
        placed_LRS = scene.placement_LRS.copy()
        placed_LRS[chosen] = found[chosen]
        return _decision(scene, placed_LRS, cpu, wall)


class _AscendPolicy:
    """vLLM-Ascend's SwiftBalancer or default: each sees the sum of the window."""

    def __init__(self, module: str, name: str) -> None:
        self._torch = _torch()
        # The one asks how many devices a host has; it also imports the device's library.
        self._torch.npu = SimpleNamespace(device_count=lambda: 8)
        stand_in("torch_npu", {})
        self._policy = getattr(import_from(VLLM_ASCEND, module), name)()

    def decide(self, scene: Scene) -> Decision:
        """Its answer is taken whether or not it thinks that changing pays."""
        workload = self._torch.from_numpy(_by_slot(scene).sum(axis=0))
        now = self._torch.from_numpy(scene.placement_LRS.copy())
        (_, _, found), cpu, wall = _timed(lambda: self._policy.rebalance_experts(now, workload))
        return _decision(scene, np.asarray(found, dtype=np.int32), cpu, wall)


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
"""STAIR's settings and their defaults; the module that declares them imports all of the engine."""


class _Stair:
    """vLLM-Ascend's STAIR, which changes layers whose balance has fallen since it last did."""

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
        """Takes the window step by step and expert by expert; one node."""
        layers, ranks, _ = scene.placement_LRS.shape
        if self._committed_L.size != layers:
            self._committed_L = np.full(layers, np.nan)
        asked = scene.heat_TLE.astype(np.float64), scene.placement_LRS.astype(np.int64), self._committed_L
        one_node_R, settings = np.zeros(ranks, dtype=np.int64), SimpleNamespace(**_STAIR)
        found, cpu, wall = _timed(lambda: self._policy.plan_rebalance(*asked, one_node_R, settings))
        predicted_L = found.predicted_mean_ratios
        self._committed_L = np.where(np.isnan(predicted_L), self._committed_L, predicted_L)
        return _decision(scene, np.asarray(found.rank_expert_ids, dtype=np.int32), cpu, wall)


class _VllmDefault:
    """vLLM's default: DeepSeek's EPLB with one group and one node."""

    def __init__(self) -> None:
        self._torch = _torch()
        self._policy = import_from(VLLM, "default").DefaultEplbPolicy

    def decide(self, scene: Scene) -> Decision:
        """Sees the sum of the window."""
        layers, ranks, slots = scene.placement_LRS.shape
        weight = self._torch.from_numpy(scene.heat_TLE.sum(axis=0).astype(np.float32))
        now = self._torch.from_numpy(scene.placement_LRS.reshape(layers, -1).astype(np.int64))
        found, cpu, wall = _timed(
            lambda: self._policy.rebalance_experts(weight, ranks * slots, 1, 1, ranks, now)
        )
        return _decision(scene, np.asarray(found, dtype=np.int32).reshape(layers, ranks, slots), cpu, wall)


class _Sglang:
    """SGLang's two balancers without expert groups: DeepSeek's on the sum, and its own variant on all steps."""

    def __init__(self, module: str) -> None:
        self._torch = _torch()
        self._module = module
        self._policy = import_from(SGLANG, module)

    def decide(self, scene: Scene) -> Decision:
        """The one sees the sum of the window, the other all its steps."""
        layers, ranks, slots = scene.placement_LRS.shape
        heat = self._torch.from_numpy(scene.heat_TLE.astype(np.float32))

        def rebalance() -> Any:
            if self._module == "deepseek":
                return self._policy.rebalance_experts(heat.sum(dim=0), ranks * slots, None, 1, ranks, False)
            return self._policy.rebalance_experts(heat, ranks * slots, slots, None, 1, False)

        (found, _, _), cpu, wall = _timed(rebalance)
        return _decision(scene, np.asarray(found, dtype=np.int32).reshape(layers, ranks, slots), cpu, wall)


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
"""Each peer by its name here: the package that it comes in, and how it is made."""


def make(name: str) -> Policy:
    """The peer called ``name``, new."""
    return PEERS[name][1]()


def _torch() -> Any:
    import torch

    torch.set_num_threads(1)
    return torch


def _by_slot(scene: Scene) -> np.ndarray:
    """Heat as the slots would have received it, float64 ``[T, L, R, S]``."""
    steps, _, experts = scene.heat_TLE.shape
    by_slot = np.empty((steps, *scene.placement_LRS.shape))
    for layer, placed_RS in enumerate(scene.placement_LRS):
        replicas_E = np.bincount(placed_RS.ravel(), minlength=experts)
        by_slot[:, layer] = scene.heat_TLE[:, layer][:, placed_RS] / replicas_E[placed_RS]
    return by_slot


def _timed(rebalance: Callable[[], Any]) -> tuple[Any, float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    found = rebalance()
    return found, time.process_time() - cpu, time.perf_counter() - wall


def _decision(scene: Scene, placed_LRS: Int32, cpu: float, wall: float) -> Decision:
    changed = int((placed_LRS != scene.placement_LRS).any(axis=(1, 2)).sum())
    return Decision(placed_LRS, None, None, changed, cpu, wall)


def _quiet_logger() -> logging.Logger:
    """A logger that drops what peers log."""
    logger = logging.getLogger("peers")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
