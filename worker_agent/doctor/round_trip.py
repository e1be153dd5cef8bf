"""One rank of the doctor: moves experts to other ranks and back, as in a live model but without a service."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from worker_agent.agent import Agent
from worker_agent.device import format_of
from worker_agent.doctor import FAILED, OK, SKIPPED, Finding
from worker_agent.settings import AgentSettings

_SLOTS = 2
_NZ = 29
_PERIOD = 251
"""Period of an expert's values. It is prime, so that adjacent rows of a tensor differ."""
_BLOCK = 32
"""Number of columns in an int8 NZ block. Matrices whose dimensions are not multiples of this number would be padded."""
_NO_SERVICE = "127.0.0.1:9"
"""Address on which no service listens."""
_MEET_SECONDS = 90


class _DoctorLayer:
    """Layer with two experts per rank, stored like an engine's quantised experts. The values identify the expert.

    Each kind of weight is a list with one tensor per expert. The kinds are int8 weights, which are in block format (NZ)
    on an NPU, and their scales.
    """

    moe_load = None
    shares_tokens = False

    def __init__(self, rank: int, ranks: int, expert_bytes: int, device: torch.device) -> None:
        self.initial = Placement.linear(1, _SLOTS * ranks, ranks, _SLOTS)
        self._side = max(1, math.isqrt(expert_bytes // 3) // _BLOCK) * _BLOCK
        experts_S = [_expert_of(expert, self._side) for expert in self.initial.phy2log_LRS[0, rank].tolist()]
        self._weights = [
            [_as_engines_store(tensor, device) for tensor in kind] for kind in zip(*experts_S, strict=True)
        ]
        self.expert_map = torch.from_numpy(self.initial.expert_map(rank)[0]).to(device)
        self.log2phy = torch.from_numpy(self.initial.default_log2phy()[rank, 0]).to(device)
        self.source_load: torch.Tensor | None = torch.zeros(
            (16, _SLOTS * ranks), dtype=torch.int32, device=device
        )
        self.load_counter = torch.zeros((), dtype=torch.int64, device=device)

    def expert_weights(self) -> list[list[torch.Tensor]]:
        """Return the weights and scales."""
        return self._weights

    @property
    def formats(self) -> list[int]:
        """Device memory formats of the weights and scales, as numbered by torch_npu."""
        return [format_of(kind[0]) for kind in self._weights]

    def holds(self, experts_S: list[int]) -> bool:
        """Return True if the slots contain exactly the values of these experts."""
        return all(
            torch.equal(kind[slot].cpu(), value)
            for slot, expert in enumerate(experts_S)
            for kind, value in zip(self._weights, _expert_of(expert, self._side), strict=True)
        )


def _expert_of(expert: int, side: int) -> list[torch.Tensor]:
    """Return an expert's weights and scales on the host: int8 ``[n, 2n]`` and ``[n, n]``, float32 and bfloat16."""
    tensors = []
    for kind, (shape, dtype) in enumerate(
        (
            ((side, 2 * side), torch.int8),
            ((side, side), torch.int8),
            ((2 * side,), torch.float32),
            ((side,), torch.bfloat16),
        )
    ):
        size = math.prod(shape)
        values = (torch.arange(_PERIOD) * (2 * expert + kind + 1) + expert) % _PERIOD - _PERIOD // 2
        tensors.append(values.to(dtype).repeat(size // _PERIOD + 1)[:size].view(shape))
    return tensors


def _as_engines_store(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device. On an NPU, convert matrices to the block format, as vLLM-Ascend does."""
    on_device = tensor.to(device)
    if device.type != "npu" or tensor.dim() < 2:
        return on_device
    import torch_npu

    in_blocks: torch.Tensor = torch_npu.npu_format_cast(on_device, _NZ)
    return in_blocks


def _there_and_back(
    layer: _DoctorLayer, agent: Agent, replay: Callable[[], list[int]] | None
) -> Iterator[Finding]:
    """Move the expert in each rank's first slot to the previous rank and back, and compare all values after each move.

    Parameters
    ----------
    layer
        Layer whose experts move.
    agent
        Agent of this rank.
    replay
        Function that replays a captured graph and returns the table that it reads; ``None`` if there is no graph.
    """
    rank = agent.identity.rank
    rotated_LRS = layer.initial.phy2log_LRS.copy()
    rotated_LRS[0, :, 0] = np.roll(rotated_LRS[0, :, 0], -1)
    rotated = Placement(rotated_LRS, layer.initial.experts)
    began = time.perf_counter()
    for target, name in ((rotated, "experts arrive"), (layer.initial, "experts return")):
        agent.restore(target)
        if not layer.holds(target.phy2log_LRS[0, rank].tolist()):
            yield Finding(name, FAILED, f"rank {rank}: a slot does not hold the values of its expert")
            return
        tables_E = target.default_log2phy()[rank, 0].tolist()
        if replay is not None and (replayed := replay()) != tables_E:
            text = f"rank {rank}: a replay reads {replayed} although the table is now {tables_E}"
            yield Finding("captured graph", FAILED, text)
            return
    seconds = time.perf_counter() - began
    megabytes = 2 * sum(weight[0].nbytes for weight in layer.expert_weights()) / 1e6
    text = f"{megabytes:.0f} MB in {seconds:.2f} s with votes and checksums, all values unchanged"
    if layer.log2phy.device.type == "npu":
        text += f"; formats {layer.formats} (29 is NZ)"
    yield Finding("expert round trip", OK, text)
    if replay is None:
        yield Finding("captured graph", SKIPPED, "this device cannot capture graphs")
    else:
        yield Finding("captured graph", OK, "replays read the table that was updated in place")


def _captured_table(layer: _DoctorLayer) -> Callable[[], list[int]] | None:
    """Capture a graph that reads the layer's table, and return a function that replays it.

    Returns ``None`` on a CPU, which cannot capture graphs.
    """
    device = layer.log2phy.device
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    graph = module.CUDAGraph() if device.type == "cuda" else module.NPUGraph()
    module.synchronize()
    with module.graph(graph):
        table_E = layer.log2phy + 0

    def replay() -> list[int]:
        graph.replay()
        module.synchronize()
        return [int(value) for value in table_E.cpu()]

    return replay


def examine(group: dist.ProcessGroup | None, device: torch.device, expert_bytes: int) -> list[Finding]:
    """Start the agent on all ranks of ``group`` and perform the round trip (collective).

    Parameters
    ----------
    group
        Process group that communicates CPU tensors.
    device
        Device of this rank.
    expert_bytes
        Approximate size of each expert.
    """
    assert group is not None
    ranks = dist.get_world_size(group)
    layer = _DoctorLayer(dist.get_rank(group), ranks, expert_bytes, device)
    settings = AgentSettings(service=_NO_SERVICE, deployment="doctor", verify_transfers=True)
    agent = Agent.start([layer], group, settings)
    try:
        text = f"{ranks} ranks can vote, and their {device.type} devices can connect to each other"
        return [
            Finding("rendezvous", OK, text),
            *_there_and_back(layer, agent, _captured_table(layer)),
        ]
    finally:
        dist.barrier(group)
        agent.close()


def _select_device(name: str) -> torch.device:
    """Make the named device the current device of this process."""
    if name.startswith("npu"):
        import torch_npu  # noqa: F401  (registers the device)
    device = torch.device(name)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def main() -> None:
    """Run one rank and print its findings as JSON.

    Usage: ``python -m worker_agent.doctor.round_trip ADDRESS RANK RANKS DEVICE BYTES``.
    """
    address, rank, ranks, device, expert_bytes = sys.argv[1:]
    try:
        timeout = timedelta(seconds=_MEET_SECONDS)
        dist.init_process_group(
            "gloo", init_method=address, rank=int(rank), world_size=int(ranks), timeout=timeout
        )
        try:
            findings = examine(dist.group.WORLD, _select_device(device), int(expert_bytes))
        finally:
            dist.destroy_process_group()
    except Exception as error:
        findings = [Finding("ranks", FAILED, f"rank {rank}: {type(error).__name__}: {error}")]
    print(json.dumps([asdict(finding) for finding in findings]), flush=True)
    sys.exit(any(finding.verdict == FAILED for finding in findings))


if __name__ == "__main__":
    main()
