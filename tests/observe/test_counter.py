"""Counts of the routers' choices, excluding padding and ids that are not routed experts."""

import pytest
import torch

from worker_agent.observe.counter import RouterCounter

CPU = torch.device("cpu")
IDS = torch.tensor([[0, 3], [3, 1], [2, 2]])


def counted(counter):
    """Return the newest row of the rings, ``[L, E]``."""
    row = (int(counter.rings.passes) - 1) % counter.rings.sources_LWE.shape[1]
    return counter.rings.sources_LWE[:, row].tolist()


@pytest.mark.parametrize(("max_rows", "expected"), [(8, [1, 1, 0, 2]), (2, [1, 1, 2, 2]), (0, [1, 1, 2, 2])])
def test_padding_is_not_counted_unless_the_batch_is_larger_than_expected(max_rows, expected):
    counter = RouterCounter(2, 4, CPU, max_rows)
    counter.expect(tokens=2)
    for layer in range(2):
        counter.count(layer, IDS)
    counter.record()
    assert counted(counter) == [expected, expected]


def test_the_engines_own_mask_replaces_the_number_of_tokens():
    counter = RouterCounter(1, 4, CPU, max_rows=8)
    counter.expect(tokens=1)
    counter.count(0, IDS, torch.tensor([False, True, True]))
    counter.record()
    assert counted(counter) == [[0, 1, 2, 1]]


def test_ids_that_are_not_routed_experts_are_not_counted():
    counter = RouterCounter(1, 4, CPU)
    counter.expect(tokens=3)
    counter.count(0, torch.tensor([[-1, 4], [0, 7]]))
    counter.record()
    assert counted(counter) == [[1, 0, 0, 0]]


def test_every_pass_has_its_own_row_and_a_dummy_pass_counts_no_tokens():
    counter = RouterCounter(1, 4, CPU)
    for counts, expected in ((True, [1, 1, 2, 2]), (False, [0, 0, 0, 0]), (True, [1, 1, 2, 2])):
        counter.expect(tokens=3)
        counter.count(0, IDS)
        counter.record(counts=counts)
        assert counted(counter) == [expected]
    assert int(counter.rings.passes) == 3


def test_choices_before_the_first_expected_pass_are_not_counted():
    counter = RouterCounter(1, 4, CPU)
    counter.count(0, IDS)
    counter.expect(tokens=1)
    counter.count(0, IDS[:1])
    counter.record()
    assert counted(counter) == [[1, 0, 0, 1]]


def test_a_pass_can_be_counted_separately_from_its_choices():
    counter = RouterCounter(2, 4, CPU)
    counter.expect(tokens=0)
    counter.count_choices(1, IDS)
    counter.count_pass()
    counter.record()
    assert counted(counter) == [[0, 0, 0, 0], [1, 1, 2, 2]]
