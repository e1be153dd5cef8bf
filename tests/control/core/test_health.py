"""Balance is shown per step and in few points, and a deployment says what is wrong, also where nothing fails."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_core.heat.assembler import HeatAssembler
from eplb_core.heat.phase import StepPhase
from eplb_core.placement import default_log2phy
from eplb_core.wire.agent import Heartbeat, Shape
from eplb_core.wire.heat import HeatReport
from eplb_core.wire.operator import BalancePoint
from eplb_service.control.core.health import (
    MAX_POINTS,
    RECENT_STEPS,
    BalanceSeries,
    mean_measured_par,
    measured_par,
    problems,
    rank_loads,
    served_now,
)
from tests.control.core.story import Story
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, SLOTS


def deployment_of(loads_TLR: np.ndarray) -> SimpleNamespace:
    """One expert and one slot per rank, so that what a slot receives is what its rank does."""
    steps, layers, ranks = loads_TLR.shape
    heat = HeatAssembler(
        Shape(ranks, layers, ranks, 1, 0), window_steps=max(1, steps), pending_steps=max(8, steps)
    )
    slots_R1 = np.arange(ranks, dtype=np.int32)[:, None]
    for layer in range(layers):
        heat.placements.place(layer, 0, slots_R1, default_log2phy(slots_R1, ranks))
    phase_T = np.full(steps, StepPhase.DECODE, dtype=np.uint8)
    for rank in range(ranks if steps else 0):
        counts_TLS = loads_TLR[:, :, rank : rank + 1].astype(np.int32)
        heat.take(rank, HeatReport(0, (0,) * layers, counts_TLS, phase_T))
    heat.put_together()
    live = SimpleNamespace(layer_epochs=(0,) * layers)
    return SimpleNamespace(heat=heat, live=live, connected=list(range(ranks)))


def test_ratios_are_taken_per_step_and_then_averaged() -> None:
    # Each step has another hottest rank: summed, they would look balanced.
    loads_TLR = np.tile(np.eye(4)[:, None] * 9 + 1, (3, 1, 1))
    assert measured_par(deployment_of(loads_TLR)).tolist() == [pytest.approx(10 / 3.25)]


def test_steps_and_layers_without_tokens_are_in_no_mean() -> None:
    loads_TLR = np.zeros((3, 2, 2))
    loads_TLR[1, 0] = (30, 10)
    par_L = measured_par(deployment_of(loads_TLR))
    assert par_L.tolist() == [1.5, 0.0]
    assert mean_measured_par(par_L) == 1.5


def test_nothing_is_measured_before_the_first_step() -> None:
    assert measured_par(deployment_of(np.zeros((0, 2, 4)))).tolist() == [0.0, 0.0]
    assert measured_par(SimpleNamespace(heat=None, live=None, connected=[])).size == 0
    assert mean_measured_par(np.zeros(2)) == 0.0


def test_nothing_is_of_now_while_no_rank_is_connected() -> None:
    gone = deployment_of(np.ones((3, 2, 2)))
    assert served_now(gone) == 3
    gone.connected = []
    assert served_now(gone) == 0
    assert measured_par(gone).size == 0
    assert rank_loads(gone, newest=2)[0] == 0


def test_figures_of_the_present_are_of_the_newest_steps_as_they_were_served() -> None:
    loads_TLR = np.tile([[30.0, 10.0]], (RECENT_STEPS + 8, 1, 1))
    loads_TLR[-RECENT_STEPS // 2 :] = 20
    assert measured_par(deployment_of(loads_TLR)).tolist() == [1.25]


def test_loads_of_ranks_are_over_the_mean_of_their_layer_and_of_the_newest_steps() -> None:
    loads_TLR = np.zeros((3, 2, 4))
    loads_TLR[0, 0] = (100, 0, 0, 0)
    loads_TLR[1:, 0] = (1, 2, 3, 2)
    steps, loads_LR = rank_loads(deployment_of(loads_TLR), newest=2)
    assert steps == 2
    np.testing.assert_allclose(loads_LR, [[0.5, 1.0, 1.5, 1.0], [0, 0, 0, 0]])
    assert rank_loads(SimpleNamespace(heat=None, live=None, connected=[]), newest=2)[0] == 0


@pytest.mark.parametrize("seconds", [10, MAX_POINTS, 3 * MAX_POINTS, 100_000])
def test_points_are_few_evenly_spaced_and_reach_from_the_start_to_now(seconds: int) -> None:
    series = BalanceSeries(interval=1.0)
    for second in range(seconds):
        series.add(BalancePoint(1000.0 + second, 1.0, 1.05, math.nan, second))
    points = series.points
    assert min(seconds, MAX_POINTS / 2 - 1) <= len(points) <= MAX_POINTS
    gap = points[-1].at - points[-2].at
    assert {round(b.at - a.at) for a, b in pairwise(points)} == {gap}
    assert points[0].at <= 1000 + gap
    assert points[-1].at > 1000 + seconds - 1 - gap
    assert all(point.layers_switched == point.at - 1000 for point in points)


WINDOW = 8


@pytest.fixture
def story() -> Story:
    made = Story()
    made.joins()
    return made


def report(
    story: Story, first_step: int, tokens: int, phase: StepPhase, *, reported: int | None = None
) -> None:
    counts = np.full((WINDOW, LAYERS, SLOTS), tokens, dtype=np.int32)
    own_T = None if reported is None else np.full(WINDOW, reported)
    for rank in range(RANKS):
        phases = np.full(WINDOW, phase, dtype=np.uint8)
        report = HeatReport(first_step, (0,) * LAYERS, counts, phases, tokens_T=own_T)
        story.deployment.heat_report(rank, report)
    story.deployment.put_together()


def test_counters_that_never_count_are_a_problem_until_they_do(story: Story) -> None:
    """A host may serve nothing for a while after its start, so this takes long."""
    for number in range(16):
        assert problems(story.deployment) == []
        report(story, number * WINDOW, 0, StepPhase.DECODE)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"no rank has counted a token in the newest {16 * WINDOW} steps")
    report(story, 16 * WINDOW, 1, StepPhase.DECODE)
    assert problems(story.deployment) == []


@pytest.mark.parametrize("phase", [StepPhase.DECODE, StepPhase.DUMMY])
def test_a_host_that_is_idle_has_no_problem(story: Story, phase: StepPhase) -> None:
    report(story, 0, 1, StepPhase.DECODE)
    for number in range(1, 40):
        report(story, number * WINDOW, 0, phase)
        assert problems(story.deployment) == []


def test_a_host_that_has_served_nothing_yet_has_no_problem(story: Story) -> None:
    """Data-parallel ranks make dummy passes from the start."""
    for number in range(40):
        report(story, number * WINDOW, 0, StepPhase.DUMMY)
        assert problems(story.deployment) == []


def test_zeros_beside_tokens_that_the_ranks_report_are_a_problem(story: Story) -> None:
    report(story, 0, 1, StepPhase.DECODE)
    report(story, WINDOW, 0, StepPhase.DECODE, reported=0)
    assert problems(story.deployment) == []
    report(story, 2 * WINDOW, 0, StepPhase.DECODE, reported=5)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"no rank has counted a token in the newest {WINDOW} steps")


def test_a_phase_that_no_step_has_is_a_problem() -> None:
    story = Story()
    story.deployment.limits = replace(story.deployment.limits, heat_phase="prefill")
    story.joins()
    for number in range(16):
        assert problems(story.deployment) == []
        report(story, number * WINDOW, 1, StepPhase.DECODE)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"none of the newest {16 * WINDOW} steps with tokens was prefill")
    report(story, 16 * WINDOW, 1, StepPhase.PREFILL)
    assert problems(story.deployment) == []


def test_tokens_in_steps_that_are_labelled_dummies_are_a_problem(story: Story) -> None:
    report(story, 0, 3, StepPhase.DUMMY)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"tokens were counted in {WINDOW} steps that all ranks label as dummies")
    report(story, WINDOW, 3, StepPhase.PREFILL)
    assert problems(story.deployment) == []


def test_ranks_of_a_mixed_group_are_named(story: Story) -> None:
    assert problems(story.deployment) == []
    group = story.deployment.group
    members = {**group.members, 1: replace(group.members[1], agent_version="0.9")}
    story.deployment.group = replace(group, members=members)
    (problem,) = problems(story.deployment)
    assert problem.startswith("the ranks run different releases of the agent (")
    assert "0.9 on ranks 1" in problem
    story.deployment.group = replace(group, members={**members, 1: replace(members[1], connected=False)})
    assert not any("releases" in problem for problem in problems(story.deployment))


@pytest.mark.parametrize("reports", [0, 1], ids=["heat that never came", "heat that stopped"])
def test_a_rank_whose_heat_is_late_is_named_with_what_it_holds_up(reports: int) -> None:
    story = Story(pending_steps=1024)
    story.joins()
    story.counts(0, 16 * reports) if reports else None
    for second in range(30):
        story.counts(16 * (second + reports), 16, ranks=range(RANKS - 1))
        story.beats(RANKS - 1, 0, story.live.digest, step=16 * second)
        story.waits(1)
        if second == 4:
            assert problems(story.deployment) == []
    (problem,) = problems(story.deployment)
    assert re.match(
        r"heat of rank 3 has been late for 2\d s, by up to 48[01] steps, which delays the first dec",
        problem,
    )
    assert story.deployment.is_due(128) == bool(reports), "one in eight steps is enough, and is whole"
    assert not story.deployment.is_due(136)
    story.waits(31)
    assert problems(story.deployment) == [], "a rank is late only while steps are made"
    story.counts(16 * reports, 480, ranks=range(RANKS - 1, RANKS))
    story.counts(16 * (30 + reports), 16)
    story.waits(1)
    assert problems(story.deployment) == []


def test_ranks_that_report_at_different_moments_are_not_late() -> None:
    story = Story(pending_steps=1024)
    story.joins()
    for second in range(60):
        story.counts(32 * second, 32, ranks=range(second % 2, RANKS - 1 + second % 2))
        story.counts(32 * second, 32)
        story.waits(1)
        assert problems(story.deployment) == []


def test_decisions_that_never_come(story: Story) -> None:
    def at(now: float, step: int) -> bool:
        for rank in range(RANKS):
            story.deployment.heartbeat(rank, Heartbeat(step=step, digest=story.live.digest))
        story.deployment.tick(now)
        return any(
            f"no decision for {now:.0f} s, in which" in problem for problem in problems(story.deployment)
        )

    assert [at(0.0, 0), at(300.0, 1000), at(601.0, 2000)] == [False, False, True]
    story.deployment.set_paused(True)
    assert not at(602.0, 2001)
    story.deployment.set_paused(False)
    story.deployment.decisions = replace(story.deployment.decisions, decided_at=1)
    assert not at(603.0, 2002)
    assert story.deployment.without_decision.seconds == 0


@pytest.mark.parametrize("routed_by_tables", [True, False])
def test_tokens_in_slots_that_no_table_names_are_a_problem(routed_by_tables: bool) -> None:
    story = Story()
    story.deployment.limits = replace(story.deployment.limits, routed_by_tables=routed_by_tables)
    story.joins()
    slots_RS = story.live.placement.phy2log_LRS[0]
    tables_RE = default_log2phy(slots_RS, EXPERTS)
    tables_RE[:] = tables_RE[0]
    story.deployment.heat.placements.place(0, 0, slots_RS, tables_RE)
    for number in range(3):
        report(story, number * WINDOW, 1, StepPhase.DECODE)
    found = problems(story.deployment)
    assert len(found) == int(routed_by_tables)
    assert all("received tokens" in one and "does not route by log2phy" in one for one in found)
