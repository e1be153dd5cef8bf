"""Other people's balancers, run from their published sources under one calling convention.

Sources are fetched from the package index into a folder that git ignores; nothing of them is kept in this project.
Only the files of the balancers are unpacked, and what they import of their hosts is stood in for by empty modules.
"""

from __future__ import annotations

import html
import importlib
import io
import logging
import re
import sys
import tarfile
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import numpy as np

SOURCES = Path(__file__).parent / ".peers"
_PACKAGES = {
    "vllm-ascend": ("vllm_ascend-0.23.0.post1.tar.gz", "vllm_ascend/eplb/core/policy/"),
    "vllm": ("vllm-0.33.0.tar.gz", "vllm/distributed/eplb/policy/"),
}

Balancer = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Heat ``[T, L, E]`` and the placement now ``[L, R, S]`` to the new placement ``[L, R, S]``."""


def fetch(index: str) -> None:
    """Download what is missing from a package index (its simple API)."""
    for package, (archive, folder) in _PACKAGES.items():
        target = SOURCES / package.replace("-", "_")
        if target.exists():
            continue
        page = urljoin(index.rstrip("/") + "/", f"{package}/")
        listing = urllib.request.urlopen(page, timeout=60).read().decode()
        links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', listing)]
        link = next(link for link in links if f"/{archive}" in link)
        data = urllib.request.urlopen(urljoin(page, link), timeout=600).read()
        target.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar.getmembers():
                inside = member.name.partition("/")[2]
                if inside.startswith(folder) and inside.endswith(".py"):
                    content = tar.extractfile(member)
                    assert content is not None
                    (target / Path(inside).name).write_bytes(content.read())


def flashlb() -> Balancer:
    """vLLM-Ascend's FlashLB, a fresh one for each call."""
    policy = _module("vllm_ascend", "policy_flashlb")
    import torch

    torch.set_num_threads(1)

    def balance(heat_TLE: np.ndarray, placement_LRS: np.ndarray) -> np.ndarray:
        workload = torch.from_numpy(_by_slot(heat_TLE, placement_LRS))
        _, chosen, found = policy.FlashLB().rebalance_experts(
            torch.from_numpy(placement_LRS.copy()), workload
        )
        placed_LRS = placement_LRS.copy()
        placed_LRS[chosen] = found[chosen]
        return placed_LRS

    return balance


def swift() -> Balancer:
    """vLLM-Ascend's SwiftBalancer."""
    policy = _module("vllm_ascend", "policy_swift_balancer")
    import torch

    # It asks how many devices a host has.
    torch.npu = types.SimpleNamespace(device_count=lambda: 8)

    def balance(heat_TLE: np.ndarray, placement_LRS: np.ndarray) -> np.ndarray:
        workload = torch.from_numpy(_by_slot(heat_TLE, placement_LRS).sum(axis=0))
        _, _, found = policy.SwiftBalanceEplb().rebalance_experts(
            torch.from_numpy(placement_LRS.copy()), workload
        )
        return np.asarray(found, dtype=np.int32)

    return balance


def vllm_default() -> Balancer:
    """vLLM's default, DeepSeek's EPLB with one group and one node."""
    policy = _module("vllm", "default")
    import torch

    def balance(heat_TLE: np.ndarray, placement_LRS: np.ndarray) -> np.ndarray:
        layers, ranks, slots = placement_LRS.shape
        weight = torch.from_numpy(heat_TLE.sum(axis=0).astype(np.float32))
        now = torch.from_numpy(placement_LRS.reshape(layers, -1).astype(np.int64))
        found = policy.DefaultEplbPolicy.rebalance_experts(weight, ranks * slots, 1, 1, ranks, now)
        found = found[0] if isinstance(found, tuple) else found
        return np.asarray(found, dtype=np.int32).reshape(layers, ranks, slots)

    return balance


PEERS: dict[str, Callable[[], Balancer]] = {
    "FlashLB (vllm-ascend 0.23)": flashlb,
    "Swift (vllm-ascend 0.23)": swift,
    "default (vllm 0.33)": vllm_default,
}


def _by_slot(heat_TLE: np.ndarray, placement_LRS: np.ndarray) -> np.ndarray:
    """Heat as the slots would have received it, float64 ``[T, L, R, S]``."""
    experts = heat_TLE.shape[2]
    slots = [
        heat_TLE[:, layer][:, placed_RS] / np.bincount(placed_RS.ravel(), minlength=experts)[placed_RS]
        for layer, placed_RS in enumerate(placement_LRS)
    ]
    return np.stack(slots, axis=1)


def _module(package: str, name: str) -> types.ModuleType:
    """Import one file of a fetched package beside empty stand-ins for its host."""

    def no_group() -> None:
        raise RuntimeError("no host here")

    stand_ins = {
        "vllm": {},
        "vllm.logger": {"logger": logging.getLogger("peers")},
        "vllm_ascend": {},
        "vllm_ascend.distributed": {},
        "vllm_ascend.distributed.parallel_state": {"get_dynamic_eplb_group": no_group},
        "torch_npu": {},
    }
    for stand_in, contents in stand_ins.items():
        module = types.ModuleType(stand_in)
        module.__dict__.update(contents)
        sys.modules.setdefault(stand_in, module)
    folder = f"peers_{package}"
    if folder not in sys.modules:
        parent = types.ModuleType(folder)
        parent.__path__ = [str(SOURCES / package)]
        sys.modules[folder] = parent
    return importlib.import_module(f"{folder}.{name}")
