"""Choices go to the entries of their expert in turn, only real ones; a step's second part goes on from the first."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.moe.dispatch.dealing import dealt
from worker_agent.moe.dispatch.interface import DispatchRequest


def by_hand(table: list[list[int]], ids: list[int], turn: Counter[int]) -> list[int | None]:
    slots: list[int | None] = []
    for expert in ids:
        slots.append(None if expert < 0 else table[expert][turn[expert] % len(table[0])])
        turn[expert] += 1
    return slots


def request_of(ids_TK: torch.Tensor, table_ED: torch.Tensor, masked: bool) -> DispatchRequest:
    tokens = ids_TK.shape[0]
    return DispatchRequest(torch.zeros(tokens, 2), ids_TK, torch.ones(ids_TK.shape), table_ED, masked=masked)


@settings(max_examples=100)
@given(
    st.integers(1, 5),
    st.sampled_from((2, 3, 8)),
    st.lists(st.integers(-1, 4), max_size=24),
    st.lists(st.integers(-1, 4), max_size=12),
    st.integers(0, 2**31),
)
def test_each_choice_is_the_next_of_its_expert(
    experts: int, width: int, first: list[int], second: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table_ED = torch.randint(0, 99, (experts, width), generator=generator, dtype=torch.int32)
    first, second = ([min(expert, experts - 1) for expert in ids] for ids in (first, second))
    masked = -1 in first + second
    one, two = (
        request_of(torch.tensor(ids, dtype=torch.int32).reshape(-1, 1), table_ED, masked)
        for ids in (first, second)
    )
    turn: Counter[int] = Counter()
    for request, ids in ((one, first), (two.after(one), second)):
        wanted = [-7 if slot is None else slot for slot in by_hand(table_ED.tolist(), ids, turn)]
        physical_TK = request.physical(nowhere=-7)
        assert physical_TK.dtype == torch.int32
        assert physical_TK.flatten().tolist() == wanted


def test_a_third_part_goes_on_from_both_before() -> None:
    table_ED = torch.tensor([[10, 11, 12, 13, 14]], dtype=torch.int32)
    parts = [request_of(torch.zeros(size, 1, dtype=torch.int64), table_ED, False) for size in (2, 1, 3)]
    second = parts[1].after(parts[0])
    third = parts[2].after(second)
    assert third.physical(0).flatten().tolist() == [13, 14, 10]


def test_a_table_without_entries_is_read_as_before() -> None:
    table_E = torch.tensor([4, 9], dtype=torch.int32)
    request = request_of(torch.tensor([[0, 1], [1, 0]]), table_E, False)
    assert request.after(request) is request
    assert request.physical(0).tolist() == [[4, 9], [9, 4]]


@pytest.mark.parametrize("width", [2, 16])
def test_dealing_is_captured_whole_in_a_graph(width: int) -> None:
    """No value of a tensor is read back and no shape depends on one: the exporter refuses both."""

    class Dealing(torch.nn.Module):
        def forward(
            self, table_ED: torch.Tensor, ids_N: torch.Tensor, active_N: torch.Tensor
        ) -> torch.Tensor:
            return dealt(table_ED, ids_N, active_N, None)

    table_ED = torch.arange(6 * width, dtype=torch.int32).view(6, width)
    ids_N, active_N = torch.tensor([3, 3, 0, 3, 5, 0]), torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    exported = torch.export.export(Dealing(), (table_ED, ids_N, active_N))
    found_N = exported.module()(table_ED, ids_N.flip(0), active_N)
    torch.testing.assert_close(found_N, dealt(table_ED, ids_N.flip(0), active_N, None))
