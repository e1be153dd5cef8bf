"""Staging keeps its memory while it may."""

from __future__ import annotations

import torch

from worker_agent.swap.staging import Staging


def test_staging_is_reused_while_it_fits_and_given_up_when_dropped() -> None:
    staging = Staging()
    assert staging.nbytes == 0
    weights = [torch.zeros(4, 3, 2), torch.zeros(4, 5)]
    first = staging.reserve(weights, 3)
    again = staging.reserve(weights, 2)
    assert staging.nbytes == 3 * 4 * (6 + 5), "three experts of float32, though two are asked for now"
    assert [buffer.data_ptr() for buffer in first] == [buffer.data_ptr() for buffer in again]
    assert [tuple(buffer.shape) for buffer in again] == [(2, 3, 2), (2, 5)]
    staging.drop()
    assert staging.nbytes == 0
    fresh = staging.reserve(weights, 2)
    assert all(new.data_ptr() != old.data_ptr() for new, old in zip(fresh, first, strict=True))


def test_a_list_of_experts_is_staged_in_tensors_of_their_own() -> None:
    staging = Staging()
    weights = [[torch.zeros(3, 2) for _ in range(4)], torch.zeros(4, 5)]
    rows, _ = staging.reserve(weights, 2)
    assert [tuple(row.shape) for row in rows] == [(3, 2), (3, 2)]
    assert staging.nbytes == 2 * 4 * (6 + 5)
    assert {row.storage_offset() for row in rows} == {0}
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 2
    # Tensors and lists of the same experts are not each other's buffers.
    stacked, _ = staging.reserve([torch.zeros(4, 3, 2), torch.zeros(4, 5)], 2)
    assert isinstance(stacked, torch.Tensor)
    assert [len(buffer) for buffer in staging.reserve(weights, 0)] == [0, 0]
