"""Rounds hold every move once and never two of one rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.swap.transfer_schedule import rounds


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1]), max_size=40
    )
)
def test_rounds_hold_every_move_once_and_never_double_a_rank(pairs: list[tuple[int, int]]) -> None:
    moves_M5 = np.array([(source, 0, target, 0, 0) for source, target in pairs], dtype=np.int32).reshape(
        -1, 5
    )
    planned = rounds(moves_M5)
    assert sorted(move for batch in planned for move in batch) == list(range(len(pairs)))
    for batch in planned:
        assert len({pairs[move][0] for move in batch}) == len(batch)
        assert len({pairs[move][1] for move in batch}) == len(batch)
