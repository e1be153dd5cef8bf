"""Tests that rows are freed after they are sent, weighted once, dealt in turn, and rejected if there is no room."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_lab.layer import LayerOptions, MicroBatch
from eplb_lab.layer.dispatch import DISPATCHER_NAMES, MC2Variant
from eplb_lab.layer.dispatch.interface import DispatchRequest, WeightAndReduce
from eplb_lab.layer.operators import reference
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import MC2_VARIANTS, Case, alone, layer_on
from tests.moe.simulated import run_simulated

ROWS_NH = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
ROW_OF_CHOICE = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
WEIGHTS_TK = torch.tensor([[0.5, 0.25], [2.0, 4.0]])
LAST_ABSENT_TK = torch.tensor([[False, False], [False, True]])


def test_a_choice_without_a_row_adds_nothing_to_the_output():
    """Uninitialised memory is not read either."""
    reduce = WeightAndReduce(ROW_OF_CHOICE, WEIGHTS_TK, LAST_ABSENT_TK)
    assert reduce(reference, ROWS_NH.clone()).tolist() == [[50.25, 100.5], [20.0, 40.0]]
    nobody_TK = torch.ones(2, 2, dtype=torch.bool)
    reduce = WeightAndReduce(torch.full((4,), -1, dtype=torch.int32), WEIGHTS_TK, nobody_TK)
    assert reduce(reference, torch.full((3, 2), torch.nan)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert reduce(reference, torch.empty(0, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_each_row_is_used_once_if_fewer_rows_than_choices_are_returned():
    """The operator is documented to need one row per choice, so rows of zeros are appended."""
    used_rows: list[list[int]] = []

    def unpermute(rows_NH: torch.Tensor, row_N: torch.Tensor, probs_TK: torch.Tensor) -> torch.Tensor:
        used_rows.append(row_N.tolist())
        return reference.npu_moe_token_unpermute(rows_NH, row_N, probs_TK)

    operators: Any = SimpleNamespace(npu_moe_token_unpermute=unpermute)
    weights_TK = WEIGHTS_TK.masked_fill(LAST_ABSENT_TK, 0.0)
    reduce = WeightAndReduce(torch.tensor([2, 0, 1, 3], dtype=torch.int32), weights_TK)
    assert reduce(operators, ROWS_NH).tolist() == [[50.25, 100.5], [20.0, 40.0]]
    assert sorted(used_rows[0]) == [0, 1, 2, 3]


PATHS = [*((name, MC2Variant()) for name in DISPATCHER_NAMES), *(("mc2", each) for each in MC2_VARIANTS[1:])]


@pytest.mark.parametrize(("dispatcher", "variant"), PATHS, ids=str)
@pytest.mark.parametrize("quantized", [False, True])
def test_values_in_padding_do_not_affect_any_output(dispatcher: str, variant: MC2Variant, quantized: bool):
    case = Case(dispatcher, experts=6, slots=3, top_k=2, tokens=(4, 3), skew=0.1, quantized=quantized)

    def both(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layer = layer_on(case, group, options=LayerOptions(mc2=variant))
        hidden_TH, ids_TK, weights_TK = case.step(group.rank)
        active_T = torch.arange(len(hidden_TH)) % 2 == group.rank
        clean_TH = layer(hidden_TH, ids_TK, weights_TK, active=active_T)
        hidden_TH[~active_T] = torch.nan
        weights_TK[~active_T] = torch.nan
        ids_TK[~active_T] = -9
        return clean_TH, layer(hidden_TH, ids_TK, weights_TK, active=active_T)

    for clean_TH, found_TH in run_simulated(2, both):
        assert torch.equal(found_TH, clean_TH)


@pytest.mark.parametrize(("dispatcher", "variant"), PATHS, ids=str)
def test_a_nan_token_does_not_affect_other_tokens(dispatcher: str, variant: MC2Variant):
    """An overflow in one request must not affect other requests, on this rank or on others."""
    case = Case(dispatcher, experts=6, slots=3, top_k=2, tokens=(4, 3), skew=0.1)

    def first_is_nan(group: RankGroup) -> list[bool]:
        hidden_TH, ids_TK, weights_TK = case.step(group.rank)
        hidden_TH[0] = torch.nan
        layer = layer_on(case, group, options=LayerOptions(mc2=variant))
        return layer(hidden_TH, ids_TK, weights_TK).isnan().any(dim=1).tolist()

    assert run_simulated(2, first_is_nan) == [[True, False, False, False], [True, False, False]]


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_strided_views_are_accepted_from_ranks_with_few_tokens(dispatcher: str, tokens: int):
    case = Case(dispatcher, experts=6, slots=3, top_k=2, tokens=(tokens, 3))

    def strided(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = case.step(group.rank)
        views = [each.repeat_interleave(2, dim=1)[:, ::2] for each in inputs]
        assert tokens != 0 or group.rank or views[2].stride(-1) == 2
        return layer_on(case, group)(*views), case.dense()(*inputs)

    for found_TH, expected_TH in run_simulated(2, strided):
        torch.testing.assert_close(found_TH, expected_TH)


def by_hand(table: list[list[int]], ids: list[int], turn: Counter[int]) -> list[int | None]:
    slots: list[int | None] = []
    for expert in ids:
        slots.append(None if expert < 0 else table[expert][turn[expert] % len(table[0])])
        turn[expert] += 1
    return slots


def request_of(ids_TK: torch.Tensor, table_ED: torch.Tensor) -> DispatchRequest:
    return DispatchRequest(torch.zeros(ids_TK.shape[0], 2), ids_TK, torch.ones(ids_TK.shape), table_ED)


@settings(max_examples=100)
@given(
    st.integers(1, 5),
    st.sampled_from((1, 2, 3, 8)),
    st.lists(st.integers(-1, 4), max_size=24),
    st.lists(st.integers(-1, 4), max_size=12),
    st.integers(0, 2**31),
)
def test_choices_of_an_expert_use_its_table_entries_in_turn(
    experts: int, width: int, first: list[int], second: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table_ED = torch.randint(0, 99, (experts, width), generator=generator, dtype=torch.int32)
    first, second = ([min(expert, experts - 1) for expert in ids] for ids in (first, second))
    first_request, second_request = (
        request_of(torch.tensor(ids, dtype=torch.int32).reshape(-1, 1), table_ED) for ids in (first, second)
    )
    turn: Counter[int] = Counter()
    for request, ids in ((first_request, first), (second_request.after(first_request), second)):
        expected_slots = [-7 if slot is None else slot for slot in by_hand(table_ED.tolist(), ids, turn)]
        physical_TK = request.physical(padding_id=-7)
        assert physical_TK.dtype == torch.int32
        assert physical_TK.flatten().tolist() == expected_slots


def test_only_masked_choices_may_repeat_an_expert_in_the_batched_format():
    case = Case("all2allv", experts=4, slots=4, top_k=3, tokens=(2,))
    hidden_TH, _, weights_TK = case.step(0)
    ids_TK = torch.tensor([[0, 0, 3], [1, 0, 1]])
    active_TK = torch.tensor([[True, False, True], [True, True, False]])
    layer = alone(case, LayerOptions(max_rank_tokens=2))
    found_TH = layer(hidden_TH, ids_TK, weights_TK, active=active_TK)
    torch.testing.assert_close(found_TH, case.dense()(hidden_TH, ids_TK, weights_TK * active_TK))
    with pytest.raises(
        ValueError, match=r"layer 3: the batched format requires distinct.*got \[0, 0, 3\] at token 0"
    ):
        layer(hidden_TH, ids_TK, weights_TK)


@pytest.mark.parametrize("variant", MC2_VARIANTS, ids=str)
def test_padding_beyond_the_size_of_a_batch_is_rejected(variant: MC2Variant):
    case = Case("mc2", experts=4, slots=4, top_k=2, tokens=(3,))
    layer = alone(case, LayerOptions(max_rank_tokens=4, mc2=variant))
    torch.testing.assert_close(layer(*case.step(0), length=4), case.dense()(*case.step(0)))
    with pytest.raises(ValueError, match=r"layer 3: .* 5 tokens, including padding, .*has room for 4"):
        layer(*case.step(0), length=5)


def test_sent_and_arrived_rows_are_released_before_the_experts_run(monkeypatch: pytest.MonkeyPatch):
    case = Case("all2allv", experts=6, slots=3, top_k=2, tokens=(5, 4))
    alive_at_run: list[int] = []

    def one_step(group: RankGroup) -> None:
        travelled: list[weakref.ref[torch.Tensor]] = []
        start = group.start_all_to_all

        def recorded(rows_NX: torch.Tensor, sent: list[int], received: list[int]) -> object:
            arriving = start(rows_NX, sent, received)
            if rows_NX.dtype != torch.uint8:
                return arriving
            travelled.append(weakref.ref(rows_NX))

            def wait() -> torch.Tensor:
                arrived_NX: torch.Tensor = arriving()
                travelled.append(weakref.ref(arrived_NX))
                return arrived_NX

            return wait

        monkeypatch.setattr(group, "start_all_to_all", recorded)
        layer = layer_on(case, group)
        experts = layer._paths["all2allv"].kernel._experts
        apply = experts.apply

        def watched(*args: Any) -> torch.Tensor:
            alive_at_run.append(sum(rows() is not None for rows in travelled))
            return apply(*args)

        monkeypatch.setattr(experts, "apply", watched)
        layer.forward_two(*(MicroBatch(*case.step(group.rank, step)) for step in range(2)))

    run_simulated(2, one_step)
    # The second micro-batch is in transit while the experts work on the first.
    assert sorted(alive_at_run) == [0, 0, 1, 1]
