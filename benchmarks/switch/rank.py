"""One rank of the benchmark: serves with and without an agent by turns, and times the parts of a switch."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.switch.host import overhead
from benchmarks.switch.ratios import Ratio, by_turns
from eplb_service.placement import Int32, Placement, default_log2phy
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from worker_agent.agent import Agent
from worker_agent.checked_plan import CheckedPlan
from worker_agent.moe import ExpertParallelMoE, MoEShape, seeded_experts
from worker_agent.settings import AgentSettings
from worker_agent.swap.carrier import ByteBudget
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane.backend import Backend
from worker_agent.swap.lane.lanes import Lanes
from worker_agent.swap.machine import StartTransfer
from worker_agent.swap.staging import install
from worker_agent.swap.transfer import TransferLimits, TransferWorker

STEP_SECONDS = 0.005
LAYERS, EXPERTS, SLOTS, TOKENS, TOP_K = 4, 16, 10, 16, 2


def swapped_RS(old_RS: Int32, turn: int) -> Int32:
    """Each rank gets two of the next rank's experts that it lacks, in place of two that have another home there."""
    new_RS = old_RS.copy()
    ranks, slots = old_RS.shape
    for rank in range(ranks):
        other = (rank + 1) % ranks
        lacking = [expert for expert in old_RS[other].tolist() if expert not in old_RS[rank]]
        spare = [slot for slot in range(slots) if (old_RS == old_RS[rank, slot]).sum() == 1]
        if not lacking or not spare:
            continue
        new_RS[rank, spare[turn % len(spare)]] = lacking[turn % len(lacking)]
    lost = set(range(EXPERTS)) - set(new_RS.ravel().tolist())
    return old_RS if lost else new_RS


def plan_for(agent: Agent, layer: int, new_RS: Int32, plan_id: int) -> CheckedPlan:
    """What a service would send this rank."""
    installed, rank = agent.installed, agent.identity.rank
    old_RS = installed.placement.phy2log_LRS[layer]
    moves = []
    for (to_rank, slot), expert in np.ndenumerate(new_RS):
        if old_RS[to_rank, slot] != expert:
            source = np.argwhere(old_RS == expert)[0].tolist()
            moves.append((*source, to_rank, slot, int(expert)))
    tables_RE = default_log2phy(new_RS, EXPERTS)
    digests = tuple(table_digest(row) for row in tables_RE)
    moves_M5 = np.array(moves, dtype=np.int32).reshape(-1, 5)
    update = RankLayer(layer, new_RS, tables_RE[rank], digests, moves_M5)
    plan = RankPlan.of(plan_id, 1, installed.epoch, installed.digest, (update,))
    return CheckedPlan(plan, installed.digest)


def layers_of(hidden: int, intermediate: int, ranks: int) -> list[ExpertParallelMoE]:
    """Live layers of this rank."""
    first_RS = Placement.linear(1, EXPERTS, ranks, SLOTS).phy2log_LRS[0]
    shapes = [MoEShape(layer, EXPERTS, hidden, intermediate) for layer in range(LAYERS)]
    return [
        ExpertParallelMoE(shape, first_RS, seeded_experts(shape), ep_group=dist.group.WORLD, heat_rows=64)
        for shape in shapes
    ]


class Server:
    """Live layers with an agent beside the same ones left alone; one forward pass of each by turns."""

    def __init__(self, hidden: int, intermediate: int, ranks: int) -> None:
        self.live = layers_of(hidden, intermediate, ranks)
        self.still = layers_of(hidden, intermediate, ranks)
        settings = AgentSettings(service="127.0.0.1:9", node="here")
        self.agent = Agent.start(self.live, dist.group.WORLD, settings)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.hidden = hidden
        self.agent_seconds: list[float] = []
        self.vote_seconds: list[float] = []
        self.switch_seconds: list[float] = []
        """Of the calls in which a layer was committed: both confirmations, the install, the next ballot."""
        vote = self.agent._switch.vote

        def timed_vote(step: int) -> None:
            before, began = self.agent.stats.layers_switched, time.perf_counter()
            vote(step)
            seconds = time.perf_counter() - began
            self.vote_seconds.append(seconds)
            if self.agent.stats.layers_switched > before:
                self.switch_seconds.append(seconds)

        self.agent._switch.vote = timed_vote  # type: ignore[method-assign]

    def step(self, layers: list[ExpertParallelMoE]) -> float:
        """Seconds of a forward pass, padded to a decode step's length, and of the agent's part in it."""
        began = time.perf_counter()
        hidden_TH = torch.randn(TOKENS, self.hidden, generator=self.generator)
        for layer in layers:
            order_TE = torch.rand(TOKENS, EXPERTS, generator=self.generator).argsort(dim=1)
            layer(hidden_TH, order_TE[:, :TOP_K], torch.full((TOKENS, TOP_K), 1 / TOP_K))
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - began)))
        if layers is self.live:
            inside = time.perf_counter()
            self.agent.step()
            self.agent_seconds.append(time.perf_counter() - inside)
        return time.perf_counter() - began

    def pairs(self, count: int, plans: bool) -> tuple[list[float], list[float]]:
        """Step times with and without the agent; with ``plans``, one is under way all the time."""
        seconds: tuple[list[float], list[float]] = ([], [])
        plan_id = 0
        for pair in range(count):
            if plans and pair % 24 == 0:
                plan_id += 1
                layer = plan_id % LAYERS
                old_RS = self.agent.installed.placement.phy2log_LRS[layer]
                self.agent._stream.plans.put(
                    plan_for(self.agent, layer, swapped_RS(old_RS, plan_id), plan_id)
                )
            order = ((0, self.live), (1, self.still)) if pair % 2 else ((1, self.still), (0, self.live))
            for place, layers in order:
                seconds[place].append(self.step(layers))
        return seconds


def _per_vote(seconds: list[float]) -> list[float]:
    """Mean over the steps from one vote to the next, where no rank holds a plan."""
    interval = AgentSettings().idle_vote_interval
    return [
        float(np.mean(seconds[at : at + interval])) for at in range(0, len(seconds) - interval + 1, interval)
    ]


def serving(hidden: int, intermediate: int, ranks: int, pairs: int) -> tuple[list[Ratio], dict[str, object]]:
    """Idle and switching, each with and without the agent in one run."""
    server = Server(hidden, intermediate, ranks)
    tensors = [t for layer in server.live for t in (*layer.expert_weights(), layer.expert_map, layer.log2phy)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    server.pairs(20, plans=False)
    server.agent_seconds.clear()
    server.vote_seconds.clear()
    on, off = server.pairs(pairs, plans=False)
    inside, voting = _per_vote(server.agent_seconds), _per_vote(server.vote_seconds)
    step = [STEP_SECONDS] * len(voting)
    ratios = [
        Ratio.of("idle vote, spread over its steps / 5 ms step", voting, step, 0.01),
        Ratio.of("step p50, agent idle / no agent", on, off, 1.03),
    ]
    switching_on, switching_off = server.pairs(pairs, plans=True)
    ratios.append(Ratio.of("step p50, agent switching / no agent", switching_on, switching_off, 1.05))
    assert addresses == [tensor.data_ptr() for tensor in tensors], "the switch moved a tensor"
    figures: dict[str, object] = {
        f"step_ms_{name}_p{percent}": 1e3 * float(np.percentile(times, percent))
        for name, times in (
            ("idle_on", on),
            ("idle_off", off),
            ("switching_on", switching_on),
            ("switching_off", switching_off),
        )
        for percent in (50, 99)
    }
    stats = server.agent.stats
    figures["vote_us_per_step_median"] = 1e6 * float(np.median(voting))
    figures["whole_agent_us_per_step_median"] = 1e6 * float(np.median(inside))
    figures["commit_adds_ms_to_its_step_p50"] = 1e3 * float(np.median(server.switch_seconds))
    figures["commit_adds_ms_to_its_step_p90"] = 1e3 * float(np.percentile(server.switch_seconds, 90))
    figures["install_ms_mean"] = 1e3 * stats.commit_seconds / stats.layers_switched
    figures["layers_switched"] = server.agent.stats.layers_switched
    server.agent.drain()
    server.agent.close()
    return ratios, figures


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
        install(layer, staged, slots, *tables)
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
) -> tuple[Ratio, float]:
    """Moving experts from rank 0 to rank 1 against the host's link; also megabytes a second.

    Those of a device go by way of the host: what two ranks on one device can do.
    """
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    shape = MoEShape(0, EXPERTS, hidden, intermediate)
    first_RS = np.arange(EXPERTS, dtype=np.int32)[None]
    layer = ExpertParallelMoE(shape, first_RS, seeded_experts(shape), device=device)
    moves_M5 = np.array([(0, slot, 1, slot, slot) for slot in range(experts)], dtype=np.int32)
    update = RankLayer(
        0, np.zeros((2, EXPERTS), dtype=np.int32), np.zeros(EXPERTS, np.int32), (0, 0), moves_M5
    )
    limits = TransferLimits(timedelta(seconds=60), AgentSettings().chunk_bytes)
    lanes = Lanes(group, Backend.GLOO, device, limits.timeout)
    worker = TransferWorker(lanes, limits, ByteBudget(None))
    link = group.process_group("raw", timedelta(seconds=60))
    size = experts * sum(weight[0].nbytes for weight in layer.expert_weights())
    raw = torch.zeros(size, dtype=torch.uint8)
    generation = 0

    def move() -> None:
        nonlocal generation
        generation += 1
        worker.start(StartTransfer(update, generation, 0), layer)
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
    plain()
    ones, others = by_turns(move, plain, rounds)
    worker.close()
    name = f"transfer of {experts} experts / one send of their {size / 1e6:.0f} MB"
    return Ratio.of(name, ones, others, 1.5), size / 1e6 / float(np.median(ones))


def main() -> None:
    """``python -m benchmarks.switch.rank RENDEZVOUS RANK RANKS OPTIONS``; rank 0 prints JSON."""
    rendezvous, rank, ranks, options = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        json.loads(sys.argv[4]),
    )
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    size = (options["hidden"], options["intermediate"])
    os.environ.setdefault("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    ratios, figures = serving(64, 32, ranks, options["pairs"])
    device = torch.device(options["device"])
    if device.type != "cpu" and torch.get_device_module(device).device_count() < ranks:
        os.environ["EPLB_AGENT_TRANSFER_BACKEND"] = "gloo"  # collectives of devices take one rank on each
    # As beside a service that keeps up: memory of reports that are gone serves the next ones.
    os.environ["EPLB_AGENT_QUEUE_REPORTS"] = "1"
    beside, more = overhead(options["pairs"], device)
    ratios.append(beside)
    figures |= more
    ratios.append(commit(*size, experts=4, rounds=options["rounds"], device=device))
    dist.barrier()
    moved, megabytes = transfer(*size, experts=4, rounds=options["rounds"], device=device)
    ratios.append(moved)
    figures["transfer_megabytes_per_second"] = megabytes
    if rank == 0:
        print(json.dumps({"ratios": [dataclasses.asdict(ratio) for ratio in ratios], "figures": figures}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
