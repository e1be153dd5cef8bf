"""The kernel must compose any parts that fit, re-use its memory, and let other work run while tokens travel."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe.cases import Case
from worker_agent.moe import seeded_experts
from worker_agent.moe.compose import ModularKernel
from worker_agent.moe.dispatch import BatchedDispatcher, DispatchRequest, build_dispatcher
from worker_agent.moe.experts import (
    ActivationFormat,
    BatchedExperts,
    ExpertBatch,
    Experts,
    GroupedExperts,
    SlotwiseExperts,
    Workspaces,
)
from worker_agent.moe.operators import GroupListType, reference
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.weights import ExpertWeights, build_weights

ALONE = RankGroup(None)
CASE = Case("all2allv", experts=6, slots=6, top_k=3, tokens=(7,))
PARTS: dict[str, Callable[[bool], Experts]] = {
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
        sender = BatchedDispatcher(sender, group.size, case.slots, max(case.tokens) + 1)
    return ModularKernel(sender, PARTS[part](weighs), **options)  # type: ignore[arg-type]


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
        ModularKernel(BatchedDispatcher(sender, 1, 4, 8), GroupedExperts(reference))


@pytest.mark.parametrize("part", ["slotwise", "batched"])
def test_layers_share_their_workspaces(part: str):
    workspaces = Workspaces()
    weights = weights_of(CASE, CASE.placement()[0].tolist())
    sizes = []
    for _ in range(3):
        kernel = kernel_of(CASE, part, workspaces=workspaces)
        kernel.run([request_of(CASE, 0)], weights, torch.float32)
        sizes.append(workspaces.bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_both_products_are_written_to_one_place():
    workspaces = Workspaces()
    kernel = kernel_of(CASE, "slotwise", workspaces=workspaces)
    dispatched = kernel.start_dispatch(request_of(CASE, 0))()
    rows = kernel.compute(dispatched.batch, weights_of(CASE, list(range(6))), torch.float32, 0)
    wide = workspaces.take(0, "wide", [1], torch.float32, rows.device)
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
    send = kernel.start_dispatch

    def recorded(name: str, receive: Callable[[], Any]) -> Callable[[], Any]:
        events.append(f"{name} sent")

        def received() -> Any:
            events.append(f"{name} received")
            return receive()

        return received

    def start_dispatch(request: DispatchRequest) -> Callable[[], Any]:
        receive = recorded("dispatch", send(request))

        def received() -> Any:
            here = receive()
            return dataclasses.replace(here, combine=lambda rows: recorded("combine", here.combine(rows)))

        return received

    kernel.start_dispatch = start_dispatch  # type: ignore[method-assign]
    return kernel


def test_other_work_runs_while_tokens_travel():
    events: list[str] = []
    kernel = watched(kernel_of(CASE, "grouped"), events)
    weights = weights_of(CASE, CASE.placement()[0].tolist())
    (result,) = kernel.run([request_of(CASE, 0)], weights, torch.float32, beside=[Recorded(events)])
    torch.testing.assert_close(result.out_TH, CASE.dense()(*CASE.step(0)))
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
    requests = [request_of(CASE, 0, step) for step in range(1 + two)]
    kernel.run(requests, weights, torch.float32, beside=[beside, None][: len(requests)])
    assert len(rows) == (4 if two else 2)
    assert beside.alive == [0]


def test_workspaces_grow_and_stay():
    workspaces, cpu = Workspaces(sets=2), torch.device("cpu")
    first = workspaces.take(0, "wide", [4, 2], torch.float32, cpu)
    assert workspaces.take(0, "wide", [3], torch.float64, cpu).data_ptr() == first.data_ptr()
    assert workspaces.take(1, "wide", [8], torch.float32, cpu).data_ptr() != first.data_ptr()
    assert workspaces.take(0, "narrow", [8], torch.float32, cpu).data_ptr() != first.data_ptr()
    assert workspaces.bytes == 96
    workspaces.take(0, "wide", [16], torch.float32, cpu)
    assert workspaces.bytes == 128
    with pytest.raises(ValueError, match="no set 2 among 2 of workspaces"):
        workspaces.take(2, "wide", [1], torch.float32, cpu)
    with pytest.raises(ValueError, match="at least one set of workspaces, got 0"):
        Workspaces(sets=0)


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    rows=st.integers(1, 7),
    form=st.sampled_from(ActivationFormat),
)
@settings(deadline=None)
def test_chunks_count_their_own_rows(counts: list[int], spare: int, rows: int, form: ActivationFormat):
    """Every row is marked with its slot, rows of no slot with -1."""
    counts_S = torch.tensor(counts)
    slots_S = torch.arange(len(counts))
    if form is ActivationFormat.STANDARD:
        marks = torch.cat([slots_S.repeat_interleave(counts_S), torch.full((spare,), -1)]).unsqueeze(1)
    else:
        length = max(counts) + spare
        real_SM = torch.arange(length) < counts_S.unsqueeze(1)
        marks = torch.where(real_SM, slots_S.unsqueeze(1), -1).unsqueeze(2)
    batch = ExpertBatch(marks, counts_S.cumsum(0), GroupListType.CUMULATIVE, weights=marks.squeeze(-1))
    axis = 0 if form is ActivationFormat.STANDARD else 1
    seen_S, end = torch.zeros_like(counts_S), 0
    for part, chunk in batch.chunks(rows):
        assert part.start == end
        end = part.stop
        assert chunk.rows.shape[axis] == part.stop - part.start <= rows
        assert chunk.counts_S.tolist() == [int((chunk.rows == slot).sum()) for slot in slots_S]
        assert chunk.weights is not None
        assert torch.equal(chunk.weights, chunk.rows.squeeze(-1))
        seen_S += chunk.counts_S
    assert end == marks.shape[axis]
    assert torch.equal(seen_S, counts_S)
