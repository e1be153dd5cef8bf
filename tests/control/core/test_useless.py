"""A deployment in which nothing fails, but balancing can do nothing, says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.control.core.health import problems
from eplb_service.wire.heat import HeatReport, StepPhase
from eplb_service.wire.hello import decode_hello
from eplb_service.wire.status import Heartbeat
from tests.control.core.story import Story
from tests.control.fake_group import LAYERS, RANKS, SLOTS, hello_of

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
    assert story.deployment.watches.undecided.seconds == 0


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
