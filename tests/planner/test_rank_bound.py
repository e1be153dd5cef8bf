"""Experts that are bound to their ranks stay where they are, whatever the heat, the policy and the split."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.settings import POLICIES, SPLITS, PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.model import SearchOptions
from tests.solver.layers_of import Case, cases


@settings(max_examples=60)
@given(cases(), st.sampled_from(POLICIES), st.sampled_from(SPLITS), st.booleans())
def test_no_plan_moves_them(case: Case, policy: str, split: str, warm: bool) -> None:
    placement = Placement.linear(1, case.experts, case.ranks, case.slots)
    topology = dataclasses.replace(Topology.flat(case.ranks), rank_bound=True)
    wanted = PlannerSettings(policy=policy, split=split, threads=1)
    window = Window(case.heat_NE[:, None])
    tables_RLE = first_tables(placement, split, wanted.deal_width)
    for made in (
        plan(window, placement, tables_RLE, topology, wanted, search=SearchOptions(warm=warm)),
        plan_afresh(window, placement, topology, wanted),
    ):
        assert made.layers == ()
        assert [verdict.reason for verdict in made.verdicts] == ["kept: its experts are bound to their ranks"]
        assert made.moves == 0
        np.testing.assert_equal(made.par_planned, made.par_seen)
