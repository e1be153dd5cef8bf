"""The two stages of a layer switch, measured separately: transferring experts between ranks, and installing them."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.switch.ratios import Ratio, by_turns
from eplb_core.wire.plan import RankLayer, sources_of
from eplb_lab.layer import ExpertParallelMoE, MoEShape, seeded_experts
from worker_agent.settings import AgentSettings
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane import Lanes
from worker_agent.swap.machine import StartTransfer
from worker_agent.swap.staging import copy_into
from worker_agent.swap.transfer import ByteBudget, TransferWorker

EXPERTS = 16


def commit(hidden: int, intermediate: int, experts: int, rounds: int, device: torch.device) -> Ratio:
    """Time installing experts in place, including the wait for the device, against a copy of the same size."""
    shape = MoEShape(0, EXPERTS, hidden, intermediate)
    first_RS = np.arange(EXPERTS, dtype=np.int32)[None]
    layer = ExpertParallelMoE(shape, first_RS, seeded_experts(shape), device=device)
    staged = [torch.randn_like(weight[:experts]) for weight in layer.expert_weights()]
    size = sum(buffer.nbytes for buffer in staged)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    slots = list(range(0, EXPERTS, EXPERTS // experts))[:experts]
    tables = (layer.expert_map.cpu().clone(), layer.log2phy.cpu().clone())

    def install() -> None:
        copy_into(layer, staged, slots, *tables)
        _finish(device)

    def copy() -> None:
        target.copy_(source)
        _finish(device)

    for _ in range(3):
        install()
        copy()
    measured, baseline = by_turns(install, copy, rounds)
    return Ratio.of(
        f"commit of {experts} experts / memcpy of their {size / 1e6:.0f} MB", measured, baseline, 1.5
    )


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def transfer(
    hidden: int, intermediate: int, experts: int, rounds: int, device: torch.device
) -> tuple[list[Ratio], float]:
    """Time an expert transfer from rank 0 to rank 1 relative to a plain send, and the slowdown from checksums.

    Experts on a device travel through host memory, because both ranks may share one device.

    Returns
    -------
    tuple of list of Ratio and float
        The two ratios, and the megabytes per second with checksums.
    """
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    shape = MoEShape(0, EXPERTS, hidden, intermediate)
    first_RS = np.arange(EXPERTS, dtype=np.int32)[None]
    layer = ExpertParallelMoE(shape, first_RS, seeded_experts(shape), device=device)
    moves_M5 = np.array([(0, slot, 1, slot, slot) for slot in range(experts)], dtype=np.int32)
    empty_RS = np.zeros((2, EXPERTS), dtype=np.int32)
    source_RS = sources_of(moves_M5, *empty_RS.shape)
    update = RankLayer(0, empty_RS, source_RS, np.zeros(EXPERTS, np.int32), ())
    unverified, verified = (
        TransferWorker(
            Lanes(group, "gloo", device, timedelta(seconds=60)),
            AgentSettings(verify_transfers=verify),
            ByteBudget(None),
        )
        for verify in (False, True)
    )
    link = group.process_group("raw", timedelta(seconds=60))
    size = experts * sum(weight[0].nbytes for weight in layer.expert_weights())
    raw = torch.zeros(size, dtype=torch.uint8)
    generation = 0

    def move(worker: TransferWorker = unverified) -> None:
        nonlocal generation
        generation += 1
        worker.start(StartTransfer((update,), generation, int(worker is verified)), [layer])
        while (result := worker.poll()) is None:
            time.sleep(0.0005)
        assert result.error is None, result.error
        dist.barrier()

    def send() -> None:
        if group.rank == 0:
            link.send([raw], 1, 0).wait()
        elif group.rank == 1:
            link.recv([raw], 0, 0).wait()
        dist.barrier()

    move()
    move(verified)
    send()
    measured, baseline = by_turns(move, send, rounds)
    checked, unchecked = by_turns(lambda: move(verified), move, rounds)
    unverified.close()
    verified.close()
    label = f"transfer of {experts} experts"
    ratios = [
        Ratio.of(f"{label} / one send of their {size / 1e6:.0f} MB", measured, baseline, 1.5),
        Ratio.of(f"{label} with checksums / without", checked, unchecked, 1.5),
    ]
    return ratios, size / 1e6 / float(np.median(checked))
