"""A batch in chunks: each must count its own rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch, chunks
from worker_agent.moe.operators import GroupListType


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
    for part, chunk in chunks(batch, rows):
        assert part.start == end
        end = part.stop
        assert chunk.rows.shape[axis] == part.stop - part.start <= rows
        assert chunk.counts_S.tolist() == [int((chunk.rows == slot).sum()) for slot in slots_S]
        assert chunk.weights is not None
        assert torch.equal(chunk.weights, chunk.rows.squeeze(-1))
        seen_S += chunk.counts_S
    assert end == marks.shape[axis]
    assert torch.equal(seen_S, counts_S)
