"""Each step may choose its dispatcher and padding, and may come in two micro-batches; its heat is one row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from eplb_service.wire.heat import StepPhase
from tests.moe.cases import Case, dealt_by_hand
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.solver.slow.stepwise import optimum
from worker_agent.moe import (
    DenseMoE,
    ExpertParallelMoE,
    LayerOptions,
    MicroBatch,
    SharedExperts,
    seeded_experts,
)
from worker_agent.moe.dispatch import MC2Variant
from worker_agent.moe.operators import reference
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shape import MoEShape
from worker_agent.moe.shared_experts import dense_shared_experts
from worker_agent.moe.weights import ExpertWeights

CASE = Case("mc2", experts=7, slots=3, top_k=2, tokens=(5, 0, 3), skew=0.2)


@pytest.fixture(autouse=True)
def operators_find_simulated_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)


def shared() -> tuple[torch.Tensor, torch.Tensor]:
    return seeded_experts(MoEShape(99, 1, CASE.hidden, CASE.intermediate))(0)


def layer_of(group: RankGroup, *dispatchers: str, **more: object) -> ExpertParallelMoE:
    w13_IH, w2_HI = shared()
    weights = ExpertWeights(w13_IH.unsqueeze(0), w2_HI.unsqueeze(0))
    return ExpertParallelMoE(
        CASE.shape,
        CASE.placement(),
        seeded_experts(CASE.shape, CASE.seed),
        dispatcher=dispatchers,
        ep_group=group,
        heat_rows=4,
        shared_experts=SharedExperts(3, weights, reference, torch.float32),
        **more,  # type: ignore[arg-type]
    )


def expected(rank: int, step: int) -> torch.Tensor:
    tokens = CASE.step(rank, step)
    dense = DenseMoE(CASE.shape, seeded_experts(CASE.shape, CASE.seed))
    return dense(*tokens) + dense_shared_experts(*shared())(tokens[0])


def source_counts(*tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> list[int]:
    ids_N = torch.cat([ids_TK.flatten() for _, ids_TK, _ in tokens])
    return torch.bincount(ids_N, minlength=CASE.experts).tolist()


def test_each_step_chooses_its_dispatcher_and_has_one_row_of_heat():
    chosen = ["mc2", "all2allv", "allgather", None]

    def steps(group: RankGroup) -> int:
        layer = layer_of(group, "mc2", "all2allv", "allgather")
        for step, dispatcher in enumerate(chosen):
            tokens = CASE.step(group.rank, step)
            out_TH = layer(*tokens, dispatcher=dispatcher, length=6 if step == 0 else None)
            torch.testing.assert_close(out_TH, expected(group.rank, step))
            assert layer.source_load is not None
            assert layer.source_load[step].tolist() == source_counts(tokens)
        assert int(layer.load_counter) == len(chosen)
        return int(layer.moe_load.sum())

    received = sum(run_simulated(CASE.ranks, steps))
    assert received == len(chosen) * CASE.top_k * sum(CASE.tokens)


def test_a_dispatcher_that_the_layer_was_not_built_with():
    def step(group: RankGroup) -> None:
        with pytest.raises(ValueError, match=r"layer 3: dispatcher must be one.*mc2 or all2allv; got 'moge'"):
            layer_of(group, "mc2", "all2allv")(*CASE.step(group.rank), dispatcher="moge")

    run_simulated(CASE.ranks, step)


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2"])
@pytest.mark.parametrize("kind", ["grouped", "slotwise", "batched"])
@pytest.mark.parametrize("variant", [MC2Variant(2), MC2Variant(1, a3=False)], ids=str)
def test_two_micro_batches_are_one_step(dispatcher: str, kind: str, variant: MC2Variant):
    options = LayerOptions(
        slotwise=kind == "slotwise", max_rank_tokens=5 if kind == "batched" else None, mc2=variant
    )

    def step(group: RankGroup) -> int:
        layer = layer_of(group, dispatcher, options=options)
        tokens = [CASE.step(group.rank, step) for step in range(2)]
        batches = [MicroBatch(*each) for each in tokens]
        outputs = layer.forward_two(batches[0], batches[1], phase=StepPhase.DECODE)
        for step, out_TH in enumerate(outputs):
            torch.testing.assert_close(out_TH, expected(group.rank, step))
        assert int(layer.load_counter) == 1
        assert layer.source_load is not None
        assert layer.source_load[0].tolist() == source_counts(*tokens)
        return int(layer.moe_load[0].sum())

    assert sum(run_simulated(CASE.ranks, step)) == 2 * CASE.top_k * sum(CASE.tokens)


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2"])
def test_two_micro_batches_are_dealt_as_one_step(dispatcher: str):
    case = replace(CASE, dispatcher=dispatcher, entries=3)

    def step(group: RankGroup) -> list[int]:
        layer = layer_of(group, dispatcher, log2phy_E=case.tables()[group.rank])
        first, second = (CASE.step(group.rank, step) for step in range(2))
        outputs = layer.forward_two(MicroBatch(*first), MicroBatch(*second))
        for step, out_TH in enumerate(outputs):
            torch.testing.assert_close(out_TH, expected(group.rank, step))
        return layer.moe_load[0].tolist()

    received = run_simulated(CASE.ranks, step)
    if dispatcher == "allgather":
        parts = [CASE.step(rank, step)[1] for step in range(2) for rank in range(CASE.ranks)]
        chosen = [torch.cat([ids_TK.flatten() for ids_TK in parts]), *[torch.zeros(0)] * (CASE.ranks - 1)]
    else:
        chosen = [
            torch.cat([CASE.step(rank, step)[1].flatten() for step in range(2)]) for rank in range(CASE.ranks)
        ]
    by_hand_P = np.bincount(dealt_by_hand(case, chosen), minlength=CASE.ranks * CASE.slots)
    assert np.ravel(received).tolist() == by_hand_P.tolist()


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2"])
def test_each_micro_batch_is_split_by_its_own_counts(dispatcher: str):
    def step(group: RankGroup) -> int:
        layer = layer_of(group, dispatcher, options=LayerOptions(split="step"))
        tokens = [CASE.step(group.rank, step) for step in range(2)]
        outputs = layer.forward_two(*(MicroBatch(*each) for each in tokens))
        for step, out_TH in enumerate(outputs):
            torch.testing.assert_close(out_TH, expected(group.rank, step))
        return int(layer.moe_load[0].sum())

    # The experts work on one micro-batch after the other, so each is to be level.
    most = 0.0
    for batch in range(2):
        counts_E = np.sum(
            [source_counts(CASE.step(rank, batch)) for rank in range(CASE.ranks)], axis=0, dtype=np.float64
        )
        most += np.floor(optimum(CASE.placement(), counts_E) + 1 + 1e-6)
    received_R = run_simulated(CASE.ranks, step)
    assert sum(received_R) == 2 * CASE.top_k * sum(CASE.tokens)
    assert max(received_R) <= most


def test_a_micro_batch_may_be_masked_or_idle():
    def step(group: RankGroup) -> None:
        layer = layer_of(group, "all2allv")
        first, second = (CASE.step(group.rank, step) for step in range(2))
        active_T = torch.arange(first[0].shape[0]) % 2 == 0
        outputs = layer.forward_two(MicroBatch(*first, active=active_T), MicroBatch(*second))
        torch.testing.assert_close(
            outputs[0], expected(group.rank, 0).masked_fill(~active_T.unsqueeze(1), 0.0)
        )
        torch.testing.assert_close(outputs[1], expected(group.rank, 1))
        for out_TH in layer.forward_two(MicroBatch(*first), MicroBatch(*second), phase=StepPhase.DUMMY):
            assert not out_TH.any()

    run_simulated(CASE.ranks, step)
