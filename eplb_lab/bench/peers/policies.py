"""Engines' balancers as entry points of the group ``eplb.policies``, for ``eplb prove`` and other commands.

A policy fetches its engine's sources from the package index unless they are cached.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from eplb_lab.bench.decision import Int32, Scene
from eplb_lab.bench.peers.archives import INDEX, fetch
from eplb_lab.bench.peers.balancers import FLASHLB, PEERS, make
from eplb_lab.bench.scoring import rule_tables


class PeerPolicy:
    """A balancer that keeps its state between decisions. Raises ``PeerError`` if its sources cannot be fetched."""

    peer: ClassVar[str]
    """Name of the balancer in ``PEERS``."""

    def __init__(self) -> None:
        fetch(PEERS[self.peer][0], INDEX)
        self._balancer = make(self.peer)

    def __call__(self, heat_TLE: np.ndarray, phy2log_LRS: Int32) -> Int32:
        """Return the new placement, int32 ``[L, R, S]``, for a window of heat and the current placement."""
        tables_RLE = rule_tables(phy2log_LRS, heat_TLE.shape[2])
        return self._balancer.decide(Scene(heat_TLE, phy2log_LRS, tables_RLE)).placement_LRS


class Vllm(PeerPolicy):
    """vLLM's default balancer."""

    peer = "vLLM default"


class SglangVec(PeerPolicy):
    """SGLang's ``deepseek_vec``, which uses each step of the window."""

    peer = "SGLang deepseek_vec"


class Sglang(PeerPolicy):
    """SGLang's default balancer."""

    peer = "SGLang deepseek"


class Swift(PeerPolicy):
    """vLLM-Ascend's SwiftBalancer."""

    peer = "Swift"


class AscendFlashLB(PeerPolicy):
    """vLLM-Ascend's FlashLB."""

    peer = FLASHLB


class Stair(PeerPolicy):
    """vLLM-Ascend's STAIR."""

    peer = "STAIR"
