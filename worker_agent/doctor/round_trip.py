"""One rank of the doctor's own: experts change ranks and come back as they do under a live model, without a service."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from worker_agent.agent import Agent
from worker_agent.doctor import FAILED, OK, SKIPPED, Finding
from worker_agent.settings import AgentSettings

_SLOTS = 2
_NOWHERE = "127.0.0.1:9"
_MEET_SECONDS = 90


class _DoctorLayer:
    """A layer of two experts per rank whose bytes say which expert they are, in two tensors."""

    moe_load = None
    shares_tokens = False

    def __init__(self, rank: int, ranks: int, expert_bytes: int, device: torch.device) -> None:
        self.first = Placement.linear(1, _SLOTS * ranks, ranks, _SLOTS)
        half = max(1, expert_bytes // 2)
        self._parts = [torch.empty((_SLOTS, half), dtype=torch.uint8, device=device) for _ in range(2)]
        for slot, expert in enumerate(self.first.phy2log_LRS[0, rank].tolist()):
            for kind, part in enumerate(self._parts):
                part[slot] = _expert_bytes_of(expert, kind, half).to(device)
        self.expert_map = torch.from_numpy(self.first.expert_map(rank)[0]).to(device)
        self.log2phy = torch.from_numpy(self.first.default_log2phy()[rank, 0]).to(device)
        self.source_load: torch.Tensor | None = torch.zeros(
            (16, _SLOTS * ranks), dtype=torch.int32, device=device
        )
        self.load_counter = torch.zeros((), dtype=torch.int64, device=device)

    def expert_weights(self) -> list[torch.Tensor]:
        """Return both tensors."""
        return self._parts

    def holds(self, experts_S: list[int]) -> bool:
        """Return whether the slots hold these experts, byte for byte."""
        half = self._parts[0].shape[1]
        return all(
            torch.equal(part[slot].cpu(), _expert_bytes_of(expert, kind, half))
            for slot, expert in enumerate(experts_S)
            for kind, part in enumerate(self._parts)
        )


def _expert_bytes_of(expert: int, kind: int, size: int) -> torch.Tensor:
    """Bytes of one tensor of an expert, uint8 ``[size]``."""
    return ((torch.arange(size) * (2 * expert + kind + 1) + expert) % 251).to(torch.uint8)


def _there_and_back(
    layer: _DoctorLayer, agent: Agent, replay: Callable[[], list[int]] | None
) -> Iterator[Finding]:
    """Experts change ranks, the first of each to the one before, are compared, and come back."""
    rank = agent.identity.rank
    turned_LRS = layer.first.phy2log_LRS.copy()
    turned_LRS[0, :, 0] = np.roll(turned_LRS[0, :, 0], -1)
    there = Placement(turned_LRS, layer.first.experts)
    began = time.perf_counter()
    for target, what in ((there, "experts arrive"), (layer.first, "experts come back")):
        agent.restore(target)
        if not layer.holds(target.phy2log_LRS[0, rank].tolist()):
            yield Finding(what, FAILED, f"rank {rank}: a slot does not hold the bytes of its expert")
            return
        tables_E = target.default_log2phy()[rank, 0].tolist()
        if replay is not None and (seen := replay()) != tables_E:
            text = f"rank {rank}: a replay reads {seen} after the table became {tables_E}"
            yield Finding("captured graph", FAILED, text)
            return
    seconds = time.perf_counter() - began
    megabytes = 2 * sum(weight[0].nbytes for weight in layer.expert_weights()) / 1e6
    text = f"{megabytes:.0f} MB in {seconds:.2f} s with votes and checksums, every byte as it was"
    yield Finding("experts there and back", OK, text)
    graph = (SKIPPED, "this device captures none")
    if replay is not None:
        graph = (OK, "replays read the table that was written in place")
    yield Finding("captured graph", *graph)


def _captured_table(layer: _DoctorLayer) -> Callable[[], list[int]] | None:
    """Replays a graph that reads the layer's table; ``None`` where the device captures none."""
    device = layer.log2phy.device
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    graph = module.CUDAGraph() if device.type == "cuda" else module.NPUGraph()
    module.synchronize()
    with module.graph(graph):
        read_E = layer.log2phy + 0

    def replay() -> list[int]:
        graph.replay()
        module.synchronize()
        return [int(value) for value in read_E.cpu()]

    return replay


def examine(group: dist.ProcessGroup | None, device: torch.device, expert_bytes: int) -> list[Finding]:
    """Meet the other ranks of ``group`` and make the round trip; a collective."""
    assert group is not None
    ranks = dist.get_world_size(group)
    layer = _DoctorLayer(dist.get_rank(group), ranks, expert_bytes, device)
    settings = AgentSettings(service=_NOWHERE, deployment="doctor", verify_transfers=True)
    agent = Agent.start([layer], group, settings)
    try:
        met = f"{ranks} ranks, their votes, and links between {device.type}s"
        return [
            Finding("ranks meet", OK, met),
            *_there_and_back(layer, agent, _captured_table(layer)),
        ]
    finally:
        dist.barrier(group)
        agent.close()


def _prepared(device_name: str) -> torch.device:
    if device_name.startswith("npu"):
        import torch_npu  # noqa: F401  (registers the device)
    device = torch.device(device_name)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def main() -> None:
    """``python -m worker_agent.doctor.round_trip ADDRESS RANK RANKS DEVICE BYTES``: findings as JSON."""
    address, rank, ranks, device, expert_bytes = sys.argv[1:]
    try:
        timeout = timedelta(seconds=_MEET_SECONDS)
        dist.init_process_group(
            "gloo", init_method=address, rank=int(rank), world_size=int(ranks), timeout=timeout
        )
        try:
            findings = examine(dist.group.WORLD, _prepared(device), int(expert_bytes))
        finally:
            dist.destroy_process_group()
    except Exception as error:
        findings = [Finding("ranks", FAILED, f"rank {rank}: {type(error).__name__}: {error}")]
    print(json.dumps([asdict(finding) for finding in findings]), flush=True)
    sys.exit(any(finding.verdict == FAILED for finding in findings))


if __name__ == "__main__":
    main()
