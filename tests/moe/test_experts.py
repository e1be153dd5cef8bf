"""Workspaces must grow to the largest demand, keep purposes and sets apart, and stay."""

from __future__ import annotations

import pytest
import torch

from worker_agent.moe.experts import Purpose, Workspaces


def test_workspaces_grow_and_stay():
    workspaces, cpu = Workspaces(sets=2), torch.device("cpu")
    first = workspaces.take(0, Purpose.WIDE, [4, 2], torch.float32, cpu)
    assert workspaces.take(0, Purpose.WIDE, [3], torch.float64, cpu).data_ptr() == first.data_ptr()
    assert workspaces.take(1, Purpose.WIDE, [8], torch.float32, cpu).data_ptr() != first.data_ptr()
    assert workspaces.take(0, Purpose.NARROW, [8], torch.float32, cpu).data_ptr() != first.data_ptr()
    assert workspaces.bytes == 96
    workspaces.take(0, Purpose.WIDE, [16], torch.float32, cpu)
    assert workspaces.bytes == 128
    with pytest.raises(ValueError, match="no set 2 among 2 of workspaces"):
        workspaces.take(2, Purpose.WIDE, [1], torch.float32, cpu)
    with pytest.raises(ValueError, match="at least one set of workspaces, got 0"):
        Workspaces(sets=0)
