"""The parts of a layer's switch by themselves: installing experts, and moving them from rank to rank."""

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
    """Installing experts in place, until the device is done, against one plain copy of as many bytes."""
    shape = MoEShape(0, EXPERTS, hidden, intermediate)
    first_RS = np.arange(EXPERTS, dtype=np.int32)[None]
    layer = ExpertParallelMoE(shape, first_RS, seeded_experts(shape), device=device)
    staged = [torch.randn_like(weight[:experts]) for weight in layer.expert_weights()]
    size = sum(buffer.nbytes for buffer in staged)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    slots = list(range(0, EXPERTS, EXPERTS // experts))[:experts]
    tables = (layer.expert_map.cpu().clone(), layer.log2phy.cpu().clone())

    def installed() -> None:
        copy_into(layer, staged, slots, *tables)
        _finish(device)

    def copied() -> None:
        target.copy_(source)
        _finish(device)

    for _ in range(3):
        installed()
        copied()
    ones, others = by_turns(installed, copied, rounds)
    return Ratio.of(f"commit of {experts} experts / memcpy of their {size / 1e6:.0f} MB", ones, others, 1.5)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def transfer(
    hidden: int, intermediate: int, experts: int, rounds: int, device: torch.device
) -> tuple[list[Ratio], float]:
    """Moving experts from rank 0 to rank 1 against the host's link, and with checksums; also megabytes a second.

    Those of a device go by way of the host: what two ranks on one device can do.
    """
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    shape = MoEShape(0, EXPERTS, hidden, intermediate)
    first_RS = np.arange(EXPERTS, dtype=np.int32)[None]
    layer = ExpertParallelMoE(shape, first_RS, seeded_experts(shape), device=device)
    moves_M5 = np.array([(0, slot, 1, slot, slot) for slot in range(experts)], dtype=np.int32)
    none_RS = np.zeros((2, EXPERTS), dtype=np.int32)
    source_RS = sources_of(moves_M5, *none_RS.shape)
    update = RankLayer(0, none_RS, source_RS, np.zeros(EXPERTS, np.int32), ())
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

    def plain() -> None:
        if group.rank == 0:
            link.send([raw], 1, 0).wait()
        elif group.rank == 1:
            link.recv([raw], 0, 0).wait()
        dist.barrier()

    move()
    move(verified)
    plain()
    ones, others = by_turns(move, plain, rounds)
    checked, unchecked = by_turns(lambda: move(verified), move, rounds)
    unverified.close()
    verified.close()
    moved = f"transfer of {experts} experts"
    ratios = [
        Ratio.of(f"{moved} / one send of their {size / 1e6:.0f} MB", ones, others, 1.5),
        Ratio.of(f"{moved} with checksums / without", checked, unchecked, 1.5),
    ]
    return ratios, size / 1e6 / float(np.median(checked))
