"""Balance is computed per step and stored in few points, and a deployment reports problems that cause no error."""

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
from eplb_core.wire.agent import Heartbeat, Shape, decode_hello
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
    recent_step_count,
)
from tests.control.core.story import Story
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, SLOTS, hello_of


def deployment_of(loads_TLR: np.ndarray) -> SimpleNamespace:
    """Return a deployment with one expert and one slot per rank, so that a slot's load equals its rank's load."""
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
    heat.assemble_steps()
    live = SimpleNamespace(layer_epochs=(0,) * layers)
    return SimpleNamespace(heat=heat, live=live, connected=list(range(ranks)))


def test_par_is_computed_per_step_and_then_averaged() -> None:
    # A different rank is hottest in each step, so the sum over steps would look balanced.
    loads_TLR = np.tile(np.eye(4)[:, None] * 9 + 1, (3, 1, 1))
    assert measured_par(deployment_of(loads_TLR)).tolist() == [pytest.approx(10 / 3.25)]


def test_means_skip_steps_and_layers_without_tokens() -> None:
    loads_TLR = np.zeros((3, 2, 2))
    loads_TLR[1, 0] = (30, 10)
    par_L = measured_par(deployment_of(loads_TLR))
    assert par_L.tolist() == [1.5, 0.0]
    assert mean_measured_par(par_L) == 1.5


def test_par_is_zero_before_the_first_step() -> None:
    assert measured_par(deployment_of(np.zeros((0, 2, 4)))).tolist() == [0.0, 0.0]
    assert measured_par(SimpleNamespace(heat=None, live=None, connected=[])).size == 0
    assert mean_measured_par(np.zeros(2)) == 0.0


def test_current_figures_are_empty_while_no_rank_is_connected() -> None:
    deployment = deployment_of(np.ones((3, 2, 2)))
    assert recent_step_count(deployment) == 3
    deployment.connected = []
    assert recent_step_count(deployment) == 0
    assert measured_par(deployment).size == 0
    assert rank_loads(deployment, newest=2)[0] == 0


def test_current_par_covers_only_the_newest_steps() -> None:
    loads_TLR = np.tile([[30.0, 10.0]], (RECENT_STEPS + 8, 1, 1))
    loads_TLR[-RECENT_STEPS // 2 :] = 20
    assert measured_par(deployment_of(loads_TLR)).tolist() == [1.25]


def test_rank_loads_are_relative_to_the_layer_mean_over_the_newest_steps() -> None:
    loads_TLR = np.zeros((3, 2, 4))
    loads_TLR[0, 0] = (100, 0, 0, 0)
    loads_TLR[1:, 0] = (1, 2, 3, 2)
    steps, loads_LR = rank_loads(deployment_of(loads_TLR), newest=2)
    assert steps == 2
    np.testing.assert_allclose(loads_LR, [[0.5, 1.0, 1.5, 1.0], [0, 0, 0, 0]])
    assert rank_loads(SimpleNamespace(heat=None, live=None, connected=[]), newest=2)[0] == 0


@pytest.mark.parametrize("seconds", [10, MAX_POINTS, 3 * MAX_POINTS, 100_000])
def test_balance_points_are_few_and_evenly_spaced_over_the_whole_history(seconds: int) -> None:
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
    story = Story()
    story.joins()
    return story


def report(
    story: Story, first_step: int, tokens: int, phase: StepPhase, *, reported: int | None = None
) -> None:
    counts = np.full((WINDOW, LAYERS, SLOTS), tokens, dtype=np.int32)
    reported_T = None if reported is None else np.full(WINDOW, reported)
    for rank in range(RANKS):
        phases = np.full(WINDOW, phase, dtype=np.uint8)
        report = HeatReport(first_step, (0,) * LAYERS, counts, phases, tokens_T=reported_T)
        story.deployment.heat_report(rank, report)
    story.deployment.assemble_steps()


def test_a_problem_is_reported_until_the_group_counts_its_first_token(story: Story) -> None:
    """The problem appears late, because a host may not serve any requests for a while after it starts."""
    for number in range(16):
        assert problems(story.deployment) == []
        report(story, number * WINDOW, 0, StepPhase.DECODE)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"no rank has counted a token in the last {16 * WINDOW} steps")
    report(story, 16 * WINDOW, 1, StepPhase.DECODE)
    assert problems(story.deployment) == []


@pytest.mark.parametrize("phase", [StepPhase.DECODE, StepPhase.DUMMY])
def test_no_problem_is_reported_for_an_idle_host(story: Story, phase: StepPhase) -> None:
    report(story, 0, 1, StepPhase.DECODE)
    for number in range(1, 40):
        report(story, number * WINDOW, 0, phase)
        assert problems(story.deployment) == []


def test_no_problem_is_reported_before_a_host_serves_its_first_request(story: Story) -> None:
    """Data-parallel ranks run dummy passes from startup."""
    for number in range(40):
        report(story, number * WINDOW, 0, StepPhase.DUMMY)
        assert problems(story.deployment) == []


def test_zero_counts_are_a_problem_if_the_ranks_report_tokens(story: Story) -> None:
    report(story, 0, 1, StepPhase.DECODE)
    report(story, WINDOW, 0, StepPhase.DECODE, reported=0)
    assert problems(story.deployment) == []
    report(story, 2 * WINDOW, 0, StepPhase.DECODE, reported=5)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"no rank has counted a token in the last {WINDOW} steps")


def test_a_configured_heat_phase_that_matches_no_step_is_a_problem() -> None:
    story = Story()
    story.deployment.limits = replace(story.deployment.limits, heat_phase="prefill")
    story.joins()
    for number in range(16):
        assert problems(story.deployment) == []
        report(story, number * WINDOW, 1, StepPhase.DECODE)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"none of the last {16 * WINDOW} steps with tokens was a prefill step")
    report(story, 16 * WINDOW, 1, StepPhase.PREFILL)
    assert problems(story.deployment) == []


def test_tokens_in_dummy_steps_are_a_problem(story: Story) -> None:
    report(story, 0, 3, StepPhase.DUMMY)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"tokens were counted in {WINDOW} steps that all ranks label as dummies")
    report(story, WINDOW, 3, StepPhase.PREFILL)
    assert problems(story.deployment) == []


def test_a_problem_names_the_ranks_with_a_different_agent_release(story: Story) -> None:
    assert problems(story.deployment) == []
    group = story.deployment.group
    members = {**group.members, 1: replace(group.members[1], agent_version="0.9")}
    story.deployment.group = replace(group, members=members)
    (problem,) = problems(story.deployment)
    assert problem.startswith("the ranks run different agent releases (")
    assert "0.9 on ranks 1" in problem
    story.deployment.group = replace(group, members={**members, 1: replace(members[1], connected=False)})
    assert not any("releases" in problem for problem in problems(story.deployment))


@pytest.mark.parametrize("reports", [0, 1], ids=["heat never arrived", "heat stopped"])
def test_a_problem_names_a_rank_with_late_heat_and_the_decision_that_it_delays(reports: int) -> None:
    story = Story(pending_steps=1024)
    story.joins()
    story.reports_heat(0, 16 * reports) if reports else None
    for second in range(30):
        story.reports_heat(16 * (second + reports), 16, ranks=range(RANKS - 1))
        story.heartbeat(RANKS - 1, 0, story.live.digest, step=16 * second)
        story.waits(1)
        if second == 4:
            assert problems(story.deployment) == []
    (problem,) = problems(story.deployment)
    assert re.match(
        r"heat of rank 3 has been late for 2\d s, by up to 48[01] steps, which delays the first dec",
        problem,
    )
    assert story.deployment.is_due(128) == bool(reports), (
        "a decision requires one in eight steps to be complete, and the reported ones suffice"
    )
    assert not story.deployment.is_due(136)
    story.waits(31)
    assert problems(story.deployment) == [], "a rank is late only while the group runs steps"
    story.reports_heat(16 * reports, 480, ranks=range(RANKS - 1, RANKS))
    story.reports_heat(16 * (30 + reports), 16)
    story.waits(1)
    assert problems(story.deployment) == []


def test_ranks_that_report_at_different_times_are_not_late() -> None:
    story = Story(pending_steps=1024)
    story.joins()
    for second in range(60):
        story.reports_heat(32 * second, 32, ranks=range(second % 2, RANKS - 1 + second % 2))
        story.reports_heat(32 * second, 32)
        story.waits(1)
        assert problems(story.deployment) == []


def test_a_long_time_without_a_decision_is_a_problem(story: Story) -> None:
    def reports_missing_decision(now: float, step: int) -> bool:
        for rank in range(RANKS):
            story.deployment.heartbeat(rank, Heartbeat(step=step, digest=story.live.digest))
        story.deployment.tick(now)
        return any(
            f"no decision has been made for {now:.0f} s, during which" in problem
            for problem in problems(story.deployment)
        )

    assert [
        reports_missing_decision(0.0, 0),
        reports_missing_decision(300.0, 1000),
        reports_missing_decision(601.0, 2000),
    ] == [False, False, True]
    story.deployment.set_paused(True)
    assert not reports_missing_decision(602.0, 2001)
    story.deployment.set_paused(False)
    story.deployment.session = replace(story.deployment.session, decided_at=1)
    assert not reports_missing_decision(603.0, 2002)
    assert story.deployment.decision_stall.seconds == 0


@pytest.mark.parametrize("split", ["tables", "even"])
def test_tokens_in_slots_that_are_in_no_table_are_a_problem(split: str) -> None:
    story = Story()
    story.deployment.limits = replace(story.deployment.limits, split=split)
    story.joins()
    slots_RS = story.live.placement.phy2log_LRS[0]
    tables_RE = default_log2phy(slots_RS, EXPERTS)
    tables_RE[:] = tables_RE[0]
    story.deployment.heat.placements.place(0, 0, slots_RS, tables_RE)
    for number in range(3):
        report(story, number * WINDOW, 1, StepPhase.DECODE)
    messages = problems(story.deployment)
    assert len(messages) == int(split == "tables")
    assert all(
        "received tokens" in message and "does not route by log2phy" in message for message in messages
    )


@pytest.mark.parametrize(
    ("split", "by_step", "problem"),
    [
        ("tables", False, None),
        ("tables", True, None),  # in this case, the service plans for the ranks' split
        ("step", True, None),
        ("even", True, "plans for split=even; serve with --split step"),
        ("deal", True, "plans for split=deal; serve with --split step"),
        ("step", False, "set EPLB_AGENT_STEP_SPLIT=on"),
    ],
)
def test_planning_for_a_split_that_the_ranks_do_not_use_is_a_problem(
    split: str, by_step: bool, problem: str | None
) -> None:
    story = Story()
    story.deployment.limits = replace(story.deployment.limits, split=split)
    for rank in range(RANKS):
        hello = decode_hello(hello_of(story.live, rank))
        story.deployment.hello(replace(hello, shape=replace(hello.shape, splits_by_step=by_step)))
    found = problems(story.deployment)
    assert len(found) == int(problem is not None)
    assert problem is None or problem in found[0]
