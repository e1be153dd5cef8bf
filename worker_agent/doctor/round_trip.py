"""One rank of the doctor's own: experts change ranks and come back as they do under a live model, without a service."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from worker_agent.agent import Agent
from worker_agent.doctor.finding import Finding
from worker_agent.settings import AgentSettings

SLOTS = 2
_NOWHERE = "127.0.0.1:9"
_MEET_SECONDS = 120


class DoctorLayer:
    """A layer of two experts per rank whose bytes say which expert they are.

    Parameters
    ----------
    rank, ranks
        Where it is.
    expert_bytes
        Size of an expert, in two tensors.
    device
        Where its weights are.
    """

    moe_load = None
    shares_tokens = False

    def __init__(self, rank: int, ranks: int, expert_bytes: int, device: torch.device) -> None:
        self.first = Placement.linear(1, SLOTS * ranks, ranks, SLOTS)
        half = max(1, expert_bytes // 2)
        self._parts = [torch.empty((SLOTS, half), dtype=torch.uint8, device=device) for _ in range(2)]
        for slot, expert in enumerate(self.first.phy2log_LRS[0, rank].tolist()):
            for kind, part in enumerate(self._parts):
                part[slot] = expert_bytes_of(expert, kind, half).to(device)
        self.expert_map = torch.from_numpy(self.first.expert_map(rank)[0]).to(device)
        self.log2phy = torch.from_numpy(self.first.default_log2phy()[rank, 0]).to(device)
        self.source_load: torch.Tensor | None = torch.zeros(
            (16, SLOTS * ranks), dtype=torch.int32, device=device
        )
        self.load_counter = torch.zeros((), dtype=torch.int64, device=device)

    def expert_weights(self) -> list[torch.Tensor]:
        """Both tensors."""
        return self._parts

    def holds(self, experts_S: list[int]) -> bool:
        """Whether the slots hold these experts, byte for byte."""
        half = self._parts[0].shape[1]
        return all(
            torch.equal(part[slot].cpu(), expert_bytes_of(expert, kind, half))
            for slot, expert in enumerate(experts_S)
            for kind, part in enumerate(self._parts)
        )


def expert_bytes_of(expert: int, kind: int, size: int) -> torch.Tensor:
    """The bytes of one tensor of an expert, uint8 ``[size]``."""
    return ((torch.arange(size) * (2 * expert + kind + 1) + expert) % 251).to(torch.uint8)


def turned(first: Placement) -> Placement:
    """Every rank gets the first expert of the next."""
    phy2log_LRS = first.phy2log_LRS.copy()
    phy2log_LRS[0, :, 0] = np.roll(phy2log_LRS[0, :, 0], -1)
    return Placement(phy2log_LRS, first.experts)


def there_and_back(
    layer: DoctorLayer, agent: Agent, replay: Callable[[], list[int]] | None
) -> Iterator[Finding]:
    """Experts change ranks, are compared, and come back."""
    rank, there = agent.identity.rank, turned(layer.first)
    began = time.perf_counter()
    for target, what in ((there, "experts arrive"), (layer.first, "experts come back")):
        agent.restore(target)
        if not layer.holds(target.phy2log_LRS[0, rank].tolist()):
            yield Finding.failed(what, f"rank {rank}: a slot does not hold the bytes of its expert")
            return
        tables_E = target.default_log2phy()[rank, 0].tolist()
        if replay is not None and (seen := replay()) != tables_E:
            yield Finding.failed(
                "captured graph", f"rank {rank}: a replay reads {seen} after the table became {tables_E}"
            )
            return
    seconds = time.perf_counter() - began
    megabytes = 2 * sum(weight[0].nbytes for weight in layer.expert_weights()) / 1e6
    yield Finding.ok(
        "experts there and back",
        f"{megabytes:.0f} MB in {seconds:.2f} s with votes and checksums, every byte as it was",
    )
    if replay is None:
        yield Finding.skipped("captured graph", "this device captures none")
    else:
        yield Finding.ok("captured graph", "replays read the table that was written in place")


def captured_table(layer: DoctorLayer) -> Callable[[], list[int]] | None:
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


def staging_memory(device: torch.device, expert_bytes: int) -> Finding:
    """Whether what one layer may receive has room beside what is there now."""
    name = "memory for staging"
    if device.type == "cpu":
        return Finding.skipped(name, "host memory is not looked at")
    free, total = torch.get_device_module(device).mem_get_info()
    text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free: room for {free // expert_bytes} incoming experts of a layer"
    return Finding.ok(name, text) if free > 2 * expert_bytes else Finding.failed(name, text)


@contextmanager
def _group(address: str, rank: int, ranks: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=_MEET_SECONDS)
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def examine(group: dist.ProcessGroup, device: torch.device, expert_bytes: int) -> list[Finding]:
    """Meet the other ranks of ``group`` and make the round trip; a collective."""
    ranks = dist.get_world_size(group)
    layer = DoctorLayer(dist.get_rank(group), ranks, expert_bytes, device)
    findings = [staging_memory(device, expert_bytes)]
    settings = AgentSettings(service=_NOWHERE, deployment="doctor", verify_transfers=True)
    agent = Agent.start([layer], group, settings)
    try:
        findings.append(
            Finding.ok("ranks meet", f"{ranks} ranks, their votes, and links between {device.type}s")
        )
        findings += there_and_back(layer, agent, captured_table(layer))
    finally:
        dist.barrier(group)
        agent.close()
    return findings


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
        with _group(address, int(rank), int(ranks)) as group:
            findings = examine(group, _prepared(device), int(expert_bytes))
    except Exception as error:
        findings = [Finding.failed("ranks", f"rank {rank}: {type(error).__name__}: {error}")]
    print(json.dumps([asdict(finding) for finding in findings]), flush=True)


if __name__ == "__main__":
    main()
