"""Tests that a captured GPU step matches the step on the CPU, uses all in-place updates, and never blocks the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_lab.layer import ExpertParallelMoE, LayerOptions, MoEShape, SharedExperts, seeded_experts
from eplb_lab.layer.operators import reference
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.weights import ExpertWeights
from tests.ranks import run_ranks
from tests.solver.placed_layer import random_placement
from worker_agent.stepwise import StepwiseSplit

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU here"),
]

GPU = "cuda"
RANKS = 8
SLOTS = 5
EXPERTS = 32
TOKENS = 40
TOP_K = 4
HIDDEN = 16
SHAPE = MoEShape(0, EXPERTS, HIDDEN, 24)
STEPS = 6
HEAT_ROWS = 4
"""Number of rows in the heat rings. It is lower than the number of steps, so that the rings wrap around."""


def captured(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture a step, and return a function that replays it and the tensor that every replay writes.

    The step runs twice before the capture, to warm up. The default capture mode does not allow other threads to make
    certain calls, even if these would not affect the capture, and communication libraries have such threads.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise ``RuntimeError`` if the host waits for the device."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # Ignore the warning that this mode is a prototype, which is issued once per process. The mode is set
            # nevertheless.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ids_of(step: int, masked: bool = True) -> torch.Tensor:
    """Return int32 ids ``[T, K]``, distinct within each token, with -1 for padding choices."""
    generator = torch.Generator().manual_seed(step)
    skew_E = -0.15 * torch.arange(EXPERTS).roll(step)
    ids_TK = (torch.randn(TOKENS, EXPERTS, generator=generator) + skew_E).topk(TOP_K).indices.int()
    absent_TK = torch.rand(TOKENS, TOP_K, generator=generator) < 0.2
    return ids_TK.masked_fill(absent_TK, -1) if masked else ids_TK


class OneOfEight(RankGroup):
    """A rank whose exchange of counts returns the rows of a given tensor, with its own row filled in."""

    def __init__(self, rank: int, counts_RE: torch.Tensor) -> None:
        super().__init__(None)
        self.rank = rank
        self.size = RANKS
        self.counts_RE = counts_RE

    def all_gather(self, rows_TX: torch.Tensor) -> torch.Tensor:
        self.counts_RE[self.rank].copy_(rows_TX[0])
        return self.counts_RE


@pytest.mark.parametrize("rank", [None, 0, 5])
def test_a_captured_split_uses_new_counts_and_placements(rank: int | None) -> None:
    generator = np.random.default_rng(0)
    placements = [random_placement(RANKS, SLOTS, EXPERTS, generator) for _ in range(STEPS)]
    splits = {where: StepwiseSplit(placements[0], EXPERTS, where) for where in ("cpu", GPU)}
    counts = {where: torch.zeros(RANKS, EXPERTS, dtype=torch.int32, device=where) for where in ("cpu", GPU)}
    group = {where: None if rank is None else OneOfEight(rank, counts[where]) for where in ("cpu", GPU)}
    ids_TK = ids_of(0).to(GPU)
    replay, found_TK = captured(lambda: splits[GPU].split(ids_TK, group[GPU]))
    chosen = set()
    for step, placed_RS in enumerate(placements):
        others_RE = torch.from_numpy(generator.poisson(9, (RANKS, EXPERTS)).astype(np.int32))
        ids_TK.copy_(ids_of(step))
        for where, split in splits.items():
            split.install(placed_RS)
            counts[where].copy_(others_RE)
        replay()
        expected_TK = splits["cpu"].split(ids_of(step), group["cpu"])
        real_TK = ids_of(step) >= 0
        assert torch.equal(found_TK.cpu()[real_TK], expected_TK[real_TK])
        logical = torch.from_numpy(placed_RS.ravel())[expected_TK[real_TK].long()]
        assert torch.equal(logical, ids_of(step)[real_TK])
        chosen.add(tuple(expected_TK[real_TK].tolist()))
    assert len(chosen) == STEPS


def test_the_split_is_bitwise_equal_on_the_cpu_and_a_gpu() -> None:
    generator = np.random.default_rng(1)
    placed_RS = random_placement(32, 9, 256, generator)
    on_cpu, on_gpu = (StepwiseSplit(placed_RS, 256, where) for where in ("cpu", GPU))
    for mean in (0.5, 4, 32, 1000):
        counts_E = torch.from_numpy(generator.poisson(mean * np.exp(generator.normal(0, 1, 256))))
        assert torch.equal(on_gpu.ends(counts_E.to(GPU)).cpu(), on_cpu.ends(counts_E))


@dataclass(frozen=True)
class Way:
    """A layer configuration that reads nothing on the host."""

    dispatcher: str
    split: str = "tables"
    entries: int = 1
    shared: bool = False
    grouped: bool = False
    """Use grouped experts in bfloat16, which a GPU kernel supports, instead of the batched format."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.grouped else torch.float32


WAYS = [
    Way("allgather"),
    Way("allgather", entries=3),
    Way("allgather", split="step", shared=True),
    Way("moge", shared=True),
    Way("moge", entries=3),
    Way("allgather", split="step", shared=True, grouped=True),
    Way("moge", grouped=True),
]
LENGTH = TOKENS + 3


def layer_of(way: Way, where: str, group: RankGroup | None = None) -> ExpertParallelMoE:
    """Return a layer with all experts on one rank."""
    shared = None
    if way.shared:
        both = seeded_experts(MoEShape(99, 1, HIDDEN, 24))(0)
        weights = ExpertWeights(*(part.unsqueeze(0).to(where, way.dtype) for part in both))
        shared = SharedExperts(0, weights, reference, way.dtype)
    return ExpertParallelMoE(
        SHAPE,
        np.arange(EXPERTS, dtype=np.int32)[None],
        seeded_experts(SHAPE),
        dealing_width=way.entries,
        dispatcher=way.dispatcher,
        ep_group=group,
        heat_rows=HEAT_ROWS,
        dtype=way.dtype,
        device=where,
        shared_experts=shared,
        options=LayerOptions(max_rank_tokens=None if way.grouped else LENGTH, split=way.split),
    )


@dataclass(frozen=True)
class Inputs:
    """Inputs to a step, apart from the layer."""

    hidden_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    active_TK: torch.Tensor

    @classmethod
    def of(cls, step: int, where: str, dtype: torch.dtype = torch.float32) -> Inputs:
        generator = torch.Generator().manual_seed(step)
        return cls(
            torch.randn(TOKENS, HIDDEN, generator=generator).to(where, dtype),
            ids_of(step, masked=False).to(where),
            torch.rand(TOKENS, TOP_K, generator=generator).to(where),
            (torch.rand(TOKENS, TOP_K, generator=generator) < 0.7).to(where),
        )

    def overwrite(self, inputs: Inputs) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(inputs, name))


def step_of(layer: ExpertParallelMoE, inputs: Inputs) -> Callable[[], torch.Tensor]:
    return lambda: layer(
        inputs.hidden_TH, inputs.ids_TK, inputs.weights_TK, active=inputs.active_TK, length=LENGTH
    )


def move_experts(layer: ExpertParallelMoE, step: int) -> None:
    """Move the experts to different slots by updating weights and tables in place, as an agent does between steps."""
    placed_S = np.random.default_rng(step).permutation(EXPERTS).astype(np.int32)
    slot_E = torch.from_numpy(placed_S.argsort().astype(np.int32))
    experts = seeded_experts(SHAPE)
    for slot, expert in enumerate(placed_S.tolist()):
        w13_IH, w2_HI = experts(expert)
        layer.w13_weight[slot].copy_(w13_IH)
        layer.w2_weight[slot].copy_(w2_HI)
    layer.expert_map.copy_(slot_E)
    layer.log2phy.copy_(slot_E if layer.log2phy.ndim == 1 else slot_E[:, None].expand_as(layer.log2phy))
    layer.install_placement(placed_S[None])


def check_captured(way: Way, group: RankGroup | None = None) -> None:
    """Compare each replay of a captured step with the same step on the CPU.

    The host must not wait for the device in any step.
    """
    live = layer_of(way, GPU, group)
    twin = layer_of(way, "cpu")
    inputs = Inputs.of(0, GPU, way.dtype)
    replay, out_TH = captured(step_of(live, inputs))
    for counted in (live.moe_load, live.source_load, live.load_counter):
        counted.zero_()
    for step in range(STEPS):
        if step % 2:
            for layer in (live, twin):
                move_experts(layer, step)
        cpu_inputs = Inputs.of(step, "cpu", way.dtype)
        inputs.overwrite(cpu_inputs)
        replay()
        expected_TH = step_of(twin, cpu_inputs)()
        tolerance = 3e-2 if way.grouped else 2e-5
        torch.testing.assert_close(out_TH.cpu(), expected_TH, rtol=tolerance, atol=tolerance)
        assert torch.equal(expected_TH.any(dim=1), cpu_inputs.active_TK.any(dim=1) | way.shared)
    for name in ("moe_load", "source_load", "load_counter"):
        assert torch.equal(getattr(live, name).cpu(), getattr(twin, name)), name
    assert int(live.load_counter) == STEPS
    assert live.moe_load.any(dim=1).all()
    with no_waiting():
        step_of(live, inputs)()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_captured_step_uses_new_tokens_weights_and_tables_and_counts_its_heat(way: Way) -> None:
    check_captured(way)


def test_the_guard_detects_that_the_host_waits_for_the_device() -> None:
    device_value = torch.ones(1, device=GPU)
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        device_value.item()


def _over_nccl() -> None:
    torch.cuda.set_device(0)
    group = dist.new_group([0], backend="nccl")
    ranks = RankGroup(group)
    for way in (WAYS[1], WAYS[2], WAYS[3], WAYS[5]):
        check_captured(way, ranks)
    dist.destroy_process_group(group)


def test_exchanges_over_nccl_can_also_be_captured() -> None:
    run_ranks(1, _over_nccl, deadline=120)
