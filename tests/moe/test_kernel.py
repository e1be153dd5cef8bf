"""The kernel must compose any parts that fit, re-use its memory, and let other work run while tokens travel."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.moe.cases import Case, ep_group
from tests.ranks import Ranks
from worker_agent.moe import DenseMoE, seeded_experts
from worker_agent.moe.dispatch import AsyncTokenDispatcher, DispatchRequest, build_dispatcher
from worker_agent.moe.dispatch.batched import batched
from worker_agent.moe.expert_batch import ExpertBatch
from worker_agent.moe.experts import (
    BatchedExperts,
    ExpertsPart,
    GroupedExperts,
    Purpose,
    SlotwiseExperts,
    Workspaces,
)
from worker_agent.moe.kernel import ModularKernel, run_two
from worker_agent.moe.operators import reference
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.weights import ExpertWeights, build_weights

ALONE = RankGroup(None)
CASE = Case("all2allv", experts=6, slots=6, top_k=3, tokens=(7,))
PARTS: dict[str, Callable[[bool], ExpertsPart]] = {
    "grouped": lambda weighs: GroupedExperts(reference, weighs=weighs),
    "slotwise": lambda weighs: SlotwiseExperts(weighs=weighs),
    "batched": lambda weighs: BatchedExperts(weighs=weighs),
}


def weights_of(case: Case, logical_S: list[int]) -> ExpertWeights:
    return build_weights(case.shape, seeded_experts(case.shape, case.seed), logical_S, torch.float32, "cpu")


def request_of(case: Case, rank: int, step: int = 0) -> DispatchRequest:
    hidden_TH, ids_TK, weights_TK = case.step(rank, step)
    return DispatchRequest(hidden_TH, ids_TK, weights_TK, torch.tensor(case.tables()[rank]))


def kernel_of(
    case: Case, part: str, weighs: bool = False, group: RankGroup = ALONE, **options: object
) -> ModularKernel:
    sender = build_dispatcher(case.dispatcher, group, case.slots, reference)
    if part == "batched":
        sender = batched(sender, group.size, case.slots, max(case.tokens) + 1)
    return ModularKernel(sender, PARTS[part](weighs), **options)  # type: ignore[arg-type]


def expected(case: Case, rank: int, step: int = 0) -> torch.Tensor:
    dense = DenseMoE(case.shape, seeded_experts(case.shape, case.seed))
    out_TH: torch.Tensor = dense(*case.step(rank, step))
    return out_TH


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("chunk_rows", [None, 1, 4, 100])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_all_parts_agree(part: str, weighs: bool, chunk_rows: int | None, tokens: int):
    case = dataclasses.replace(CASE, tokens=(tokens,))
    kernel = kernel_of(case, part, weighs, chunk_rows=chunk_rows)
    weights = weights_of(case, case.placement()[0].tolist())
    result = kernel.run(request_of(case, 0), weights, torch.float32)
    torch.testing.assert_close(result.out_TH, expected(case, 0))
    assert int(result.heat_S.sum()) == 3 * tokens
    assert result.beside_TH is None


def test_formats_must_agree():
    sender = build_dispatcher("all2allv", ALONE, 4, reference)
    with pytest.raises(
        ValueError,
        match="All2AllVDispatcher gives the standard activation format, BatchedExperts takes the batched",
    ):
        ModularKernel(sender, BatchedExperts())
    with pytest.raises(
        ValueError, match="BatchedDispatcher gives the batched activation format, GroupedExperts"
    ):
        ModularKernel(batched(sender, 1, 4, 8), GroupedExperts(reference))


@pytest.mark.parametrize("part", ["slotwise", "batched"])
def test_layers_share_their_workspaces(part: str):
    workspaces = Workspaces()
    weights = weights_of(CASE, CASE.placement()[0].tolist())
    sizes = []
    for _ in range(3):
        kernel = kernel_of(CASE, part, workspaces=workspaces)
        kernel.run(request_of(CASE, 0), weights, torch.float32)
        sizes.append(workspaces.bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_both_products_are_written_to_one_place():
    workspaces = Workspaces()
    kernel = kernel_of(CASE, "slotwise", workspaces=workspaces)
    dispatched = kernel.start_dispatch(request_of(CASE, 0)).receive()
    rows = kernel.compute(dispatched.batch, weights_of(CASE, list(range(6))), torch.float32, 0)
    wide = workspaces.take(0, Purpose.WIDE, [1], torch.float32, rows.device)
    assert rows.data_ptr() == wide.data_ptr()


class Recorded:
    """Work beside the kernel that records when it ran."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def during_dispatch(self) -> None:
        self.events.append("part 1")

    def during_combine(self) -> torch.Tensor:
        self.events.append("part 2")
        return torch.ones(1)


def watched(kernel: ModularKernel, events: list[str]) -> ModularKernel:
    """The kernel, recording when it sends and when it has received."""
    dispatcher = kernel._dispatcher
    assert isinstance(dispatcher, AsyncTokenDispatcher)

    def recording(name: str) -> None:
        start = getattr(dispatcher, f"start_{name}")

        def recorded(*args: object) -> object:
            events.append(f"{name} sent")
            flight = start(*args)

            def receive() -> object:
                flight.hook()
                events.append(f"{name} received")
                return flight.receive()

            return dataclasses.replace(flight, receive=receive)

        setattr(dispatcher, f"start_{name}", recorded)

    recording("dispatch")
    recording("combine")
    return kernel


def test_other_work_runs_while_tokens_travel():
    events: list[str] = []
    kernel = watched(kernel_of(CASE, "grouped"), events)
    weights = weights_of(CASE, CASE.placement()[0].tolist())
    result = kernel.run(request_of(CASE, 0), weights, torch.float32, beside=Recorded(events))
    torch.testing.assert_close(result.out_TH, expected(CASE, 0))
    assert result.beside_TH is not None
    assert events == [
        "dispatch sent", "part 1", "dispatch received", "combine sent", "part 2", "combine received",
    ]  # fmt: skip


class Watching(Recorded):
    """Work beside the kernel that records which rows are still there while outputs return."""

    def __init__(self, rows: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__([])
        self.rows = rows
        self.alive: list[int] = []

    def during_combine(self) -> torch.Tensor:
        self.alive.append(sum(each() is not None for each in self.rows))
        return super().during_combine()


@pytest.mark.parametrize("two", [False, True])
def test_rows_and_outputs_are_released_before_outputs_return(two: bool, monkeypatch: pytest.MonkeyPatch):
    kernel = kernel_of(CASE, "grouped", workspaces=Workspaces(sets=2))
    weights = weights_of(CASE, CASE.placement()[0].tolist())
    rows: list[weakref.ref[torch.Tensor]] = []
    compute = kernel.compute

    def watched(batch: ExpertBatch, *args: Any) -> torch.Tensor:
        out_NH = compute(batch, *args)
        rows.extend([weakref.ref(batch.rows), weakref.ref(out_NH)])
        return out_NH

    monkeypatch.setattr(kernel, "compute", watched)
    beside = Watching(rows)
    if two:
        requests = request_of(CASE, 0), request_of(CASE, 0, 1)
        run_two(kernel, requests, weights, torch.float32, beside=(beside, None))
    else:
        kernel.run(request_of(CASE, 0), weights, torch.float32, beside=beside)
    assert len(rows) == (4 if two else 2)
    assert beside.alive == [0]


def two_batches(case: Case, part: str) -> list[float] | None:
    """Two overlapping batches against each alone."""
    group, rank = ep_group(case.ranks), dist.get_rank()
    if rank >= case.ranks:
        return None
    kernel = kernel_of(case, part, group=RankGroup(group), workspaces=Workspaces(sets=2))
    weights = weights_of(case, case.placement()[rank].tolist())
    requests = [request_of(case, rank, step) for step in range(2)]
    results = run_two(kernel, (requests[0], requests[1]), weights, torch.float32)
    return [
        float((result.out_TH - expected(case, rank, step)).abs().max()) for step, result in enumerate(results)
    ]


@pytest.mark.parametrize("dispatcher", ["all2allv", "mc2"])
@pytest.mark.parametrize("part", PARTS)
def test_two_batches_overlap(eight_ranks: Ranks, dispatcher: str, part: str):
    case = Case(dispatcher, experts=6, slots=3, top_k=2, tokens=(5, 5, 5, 5), skew=0.2)
    results = eight_ranks.run(two_batches, case, part)[: case.ranks]
    assert max(max(differences) for differences in results) <= 1e-5
