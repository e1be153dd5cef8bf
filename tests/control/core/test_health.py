"""Balance is shown per step and in few points, and a deployment says what is wrong, also where nothing fails."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_service.control.core.health import (
    MOST_POINTS,
    BalanceSeries,
    mean_measured_par,
    measured_par,
    problems,
    rank_loads,
)
from eplb_service.heat.assembler import HeatAssembler
from eplb_service.placement import default_log2phy
from eplb_service.wire.agent import Heartbeat, Shape, decode_hello
from eplb_service.wire.heat import HeatReport, StepPhase
from eplb_service.wire.operator import BalancePoint
from tests.control.core.story import Story
from tests.control.fake_group import LAYERS, RANKS, SLOTS, hello_of


def deployment_of(loads_TLR: np.ndarray) -> SimpleNamespace:
    """One expert and one slot per rank, so that what a slot receives is what its rank does."""
    steps, layers, ranks = loads_TLR.shape
    heat = HeatAssembler(Shape(ranks, layers, ranks, 1, 0), window_steps=max(1, steps), pending_steps=8)
    slots_R1 = np.arange(ranks, dtype=np.int32)[:, None]
    for layer in range(layers):
        heat.placements.place(layer, 0, slots_R1, default_log2phy(slots_R1, ranks))
    phase_T = np.full(steps, StepPhase.DECODE, dtype=np.uint8)
    for rank in range(ranks if steps else 0):
        counts_TLS = loads_TLR[:, :, rank : rank + 1].astype(np.int32)
        heat.add(rank, HeatReport(0, (0,) * layers, counts_TLS, phase_T))
    return SimpleNamespace(heat=heat, live=SimpleNamespace(layer_epochs=(0,) * layers))


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
    assert measured_par(SimpleNamespace(heat=None, live=None)).size == 0
    assert mean_measured_par(np.zeros(2)) == 0.0


def test_loads_of_ranks_are_over_the_mean_of_their_layer_and_of_the_newest_steps() -> None:
    loads_TLR = np.zeros((3, 2, 4))
    loads_TLR[0, 0] = (100, 0, 0, 0)
    loads_TLR[1:, 0] = (1, 2, 3, 2)
    steps, loads_LR = rank_loads(deployment_of(loads_TLR), newest=2)
    assert steps == 2
    np.testing.assert_allclose(loads_LR, [[0.5, 1.0, 1.5, 1.0], [0, 0, 0, 0]])
    assert rank_loads(SimpleNamespace(heat=None, live=None), newest=2)[0] == 0


def series(seconds: int) -> BalanceSeries:
    made = BalanceSeries(interval=1.0)
    for second in range(seconds):
        floor = math.nan if second < 3 else 1.1
        made.add(BalancePoint(1000.0 + second, 1.0 + second / seconds, 1.05, floor, second // 10))
    return made


def test_a_point_per_second_at_first() -> None:
    points = series(10).points
    assert [point.at for point in points] == [1000.0 + second for second in range(10)]
    assert math.isnan(points[0].noise_floor)
    assert points[-1].noise_floor == 1.1


@pytest.mark.parametrize("seconds", [MOST_POINTS, 3 * MOST_POINTS, 100_000])
def test_it_stays_small_even_and_whole(seconds: int) -> None:
    points = series(seconds).points
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    gaps = {round(b.at - a.at) for a, b in pairwise(points[1:])}
    assert max(gaps) <= 2 * min(gaps)
    assert points[-1].at >= 1000 + seconds - 1 - max(gaps)
    assert [point.par for point in points] == sorted(point.par for point in points)
    assert points[-1].layers_switched >= (seconds - 1 - max(gaps)) // 10


def test_what_is_not_known_is_in_no_mean() -> None:
    made = BalanceSeries(interval=10.0)
    for second, floor in enumerate([math.nan] * 6 + [1.2] * 6):
        made.add(BalancePoint(float(second), 1.5, math.nan, floor, 0))
    first, second_point = made.points
    assert math.isnan(first.noise_floor)
    assert second_point.noise_floor == pytest.approx(1.2)
    assert math.isnan(second_point.par_planned)


WINDOW = 8


@pytest.fixture
def story() -> Story:
    made = Story()
    made.joins()
    return made


def report(story: Story, first_step: int, tokens: int, phase: StepPhase, *ranks: int) -> None:
    counts = np.full((WINDOW, LAYERS, SLOTS), tokens, dtype=np.int32)
    for rank in ranks or range(RANKS):
        epochs = (story.live.epoch,) * LAYERS
        phases = np.full(WINDOW, phase, dtype=np.uint8)
        story.deployment.heat_report(rank, HeatReport(first_step, epochs, counts, phases))
    story.deployment.put_together()


def test_counters_that_stay_zero(story: Story) -> None:
    report(story, 0, 0, StepPhase.DECODE)
    (problem,) = problems(story.deployment)
    assert problem.startswith(f"no rank has counted a token in the newest {WINDOW} steps")
    report(story, WINDOW, 1, StepPhase.DECODE)
    assert problems(story.deployment) == []


def test_nothing_but_dummies(story: Story) -> None:
    for number in range(16):
        assert problems(story.deployment) == []
        report(story, number * WINDOW, 0, StepPhase.DUMMY)
    (problem,) = problems(story.deployment)
    assert "were dummies on all ranks" in problem
    report(story, 16 * WINDOW, 1, StepPhase.DECODE)
    assert problems(story.deployment) == []


def test_experts_that_are_bound_to_their_ranks() -> None:
    story = Story()
    for rank in range(RANKS):
        hello = hello_of(story.live, rank)
        hello.shape.rank_bound = True
        story.deployment.hello(decode_hello(hello))
    (problem,) = problems(story.deployment)
    assert problem.startswith("experts are bound to their ranks")
    story.deployment.paused = True
    assert problems(story.deployment) == []


def at(story: Story, now: float, step: int) -> None:
    live = story.live
    for rank in range(RANKS):
        story.deployment.heartbeat(rank, Heartbeat(step=step, epoch=live.epoch, digest=live.digest))
    story.deployment.tick(now)


def test_decisions_that_never_come(story: Story) -> None:
    at(story, 0.0, 0)
    at(story, 300.0, 1000)
    assert not any("no decision" in problem for problem in problems(story.deployment))
    at(story, 601.0, 2000)
    assert any(
        "no decision for 601 s, in which the ranks made 2000 steps" in one
        for one in problems(story.deployment)
    )
    story.deployment.paused = True
    assert not any("no decision" in problem for problem in problems(story.deployment))
    story.deployment.paused = False
    decisions = story.deployment.decisions
    story.deployment.decisions = replace(decisions, decided_at=decisions.decided_at + 1)
    at(story, 602.0, 2001)
    assert story.deployment.watches.undecided_seconds == 0


def test_steps_that_are_lost(story: Story) -> None:
    at(story, 0.0, 0)
    for number in range(8):
        report(story, number * WINDOW, 1, StepPhase.DECODE, *([] if number % 2 else [0, 1]))
    at(story, 61.0, 64)
    assert any("of the last minute's steps are lost" in problem for problem in problems(story.deployment))
    for number in range(8, 16):
        report(story, number * WINDOW, 1, StepPhase.DECODE)
    at(story, 122.0, 128)
    at(story, 183.0, 128)
    assert problems(story.deployment) == []


def test_what_is_wrong_with_the_service_is_a_problem_of_each_deployment(story: Story) -> None:
    story.deployment = replace(story.deployment, service_problems=("the disk is full",))
    assert problems(story.deployment) == ["the disk is full"]
