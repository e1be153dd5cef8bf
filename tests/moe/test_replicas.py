"""The table of copies must list every slot of every expert, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import PlacementError
from tests.moe.cases import Case
from worker_agent.moe.maps.replicas import replica_table


@given(ranks=st.integers(1, 4), slots=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
@settings(deadline=None)
def test_every_slot_is_listed_once(ranks: int, slots: int, seed: int, data: st.DataObject):
    experts = data.draw(st.integers(slots, ranks * slots))
    phy2log_RS = Case("all2allv", experts, slots, 1, (0,) * ranks, seed=seed).placement()
    table = replica_table(phy2log_RS, experts)
    for expert, row in enumerate(table.log2phys_EC.tolist()):
        copies = np.flatnonzero(phy2log_RS.ravel() == expert).tolist()
        assert row == copies + [-1] * (len(row) - len(copies))
        assert table.counts_E[expert] == len(copies)
    assert table.log2phys_EC.shape[1] == table.counts_E.max()


def test_columns_may_be_fixed_for_graphs():
    phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    assert replica_table(phy2log_RS, 3, columns=3).log2phys_EC.tolist() == [
        [0, 2, -1],
        [1, -1, -1],
        [3, -1, -1],
    ]
    with pytest.raises(ValueError, match="an expert has 2 copies, which do not fit 1 columns"):
        replica_table(phy2log_RS, 3, columns=1)
    with pytest.raises(PlacementError, match="expert 3 is in no slot"):
        replica_table(phy2log_RS, 4)
