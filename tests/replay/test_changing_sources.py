"""Constant heat from changing source ranks raises no alarm, and promises take the changes into account."""

from __future__ import annotations

from unittest import mock

import numpy as np

from eplb_core.planner.pace import Pace
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.trace import ArrayTrace, TraceFacts
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, scene_for
from eplb_service.replay.loop import run
from eplb_service.replay.policy import Setup

RANKS = 8
LAYERS = 2
EXPERTS = 32
STEPS = 320


def prompts_on_other_ranks(seed: int) -> ArrayTrace:
    """Return a trace in which each rank has one prompt and the prompts change ranks at every step."""
    generator = np.random.default_rng(seed)
    shape = (LAYERS, RANKS, EXPERTS)
    popularity_LRE = np.exp(generator.normal(size=(LAYERS, 1, EXPERTS)) + 0.8 * generator.normal(size=shape))
    popularity_LRE /= popularity_LRE.sum(axis=2, keepdims=True)
    source_TRLE = np.zeros((STEPS, RANKS, LAYERS, EXPERTS), dtype=np.int32)
    for source_RLE in source_TRLE:
        drawn_LRE = generator.multinomial(2048, popularity_LRE[:, generator.permutation(RANKS)])
        source_RLE[:] = drawn_LRE.transpose(1, 0, 2)
    return ArrayTrace(source_TRLE.sum(axis=1), TraceFacts(ranks=RANKS), source_TRLE=source_TRLE)


def test_changing_sources_raise_no_alarm_and_promises_hold() -> None:
    settings = PlannerSettings(threads=1)
    (*_, job) = jobs_for(["flashlb"], [Setup(5, 256, 64)], settings, hindsight=False)
    scene = scene_for(RANKS, Costs.of(settings, LAYERS))
    alarms = []
    find = Pace._find_alarm

    def record_alarm(pace: Pace) -> object:
        alarms.append(find(pace))
        return alarms[-1]

    with mock.patch.object(Pace, "_find_alarm", record_alarm):
        rows = list(run(job, prompts_on_other_ranks(0), scene))
    assert alarms
    assert not any(alarms)
    realised = float(np.mean([row.par_realised for row in rows]))
    # The tables are fitted to the mean sources, so steps with different sources lose at least a tenth.
    assert realised > 1.1
    for row in rows:
        assert row.par_planned is not None
        assert abs(row.par_planned / row.par_realised - 1.0) < 0.03
