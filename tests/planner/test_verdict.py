"""Every verdict gives a reason that fits what was decided, and its figures agree with each other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from eplb_service.planner.decide import _Judge
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.engine import OutOfTimeError, SolverError
from eplb_service.solver.layer import Answer
from eplb_service.solver.model import FRESH, KEEP, LOCAL, TABLES, Candidate
from eplb_service.wire.operator import LayerVerdict


def judge(
    seen: float = 1.4, floor: float = 1.05, bound: float = 1.1, par: float = 1.5, **settings: object
) -> _Judge:
    """Of one layer; ``seen``, ``floor`` and ``bound`` in episodes of 4 steps, ``par`` and a floor of 1.1 per step."""
    of_one = (np.array([value]) for value in (par, 1.1, seen, floor, bound))
    return _Judge(*of_one, episode_steps=4.0, bytes_per_expert=1000, settings=PlannerSettings(**settings))


def answer(taken: int, par: float = 1.2, hindsight: float = 1.15, half_life: float = math.inf) -> Answer:
    found = Candidate(np.zeros((2, 2), np.int32), np.zeros((2, 4), np.int32), par, 3)
    return Answer(found, 1.4, found._replace(par=hindsight), half_life, taken)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (judge(seen=1.015), "left alone: 1.015 in episodes of 4 steps is at or below the threshold 1.02"),
        (
            judge(seen=1.055),
            "left alone: of 1.055 in episodes of 4 steps, 1.050 is token noise that no placement can win",
        ),
        (
            judge(seen=1.105),
            "left alone: 1.105 in episodes of 4 steps is no more than its experts' jumps make of balanced ranks",
        ),
        (judge(par=math.nan, seen=1.0), "left alone: it received no tokens"),
        (judge(max_layers=7), "waits: only the 7 worst layers change in one decision"),
    ],
)
def test_layers_not_looked_into(given: _Judge, reason: str) -> None:
    verdict = given.not_picked(0)
    assert verdict.reason == reason
    assert_kept(verdict)
    assert verdict.hindsight is verdict.regret is None


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (OutOfTimeError("the budget of 5 ms was spent"), "waits: the budget of 5 ms was spent"),
        (SolverError("ValueError: no"), "kept: the solver failed (ValueError: no)"),
        ("expert 3 is twice on rank 0", "kept: the solver failed (expert 3 is twice on rank 0)"),
    ],
)
def test_layers_without_an_answer(cause: Exception | str, reason: str) -> None:
    verdict = judge().unanswered(0, cause)
    assert verdict.reason == reason
    assert_kept(verdict)


@pytest.mark.parametrize(
    ("hindsight", "reason"),
    [
        (1.395, "even hindsight would have won only 0.005 in episodes of 4 steps"),
        (1.6, "even hindsight would have won only 0.000 in episodes of 4 steps"),
        (
            1.2,
            "hindsight would have won 0.200 in episodes of 4 steps, but on the newer half of the window nothing fitted",
        ),
    ],
)
@pytest.mark.parametrize(("steps_hindsight", "regret"), [(1.3, 0.2), (1.6, 0.0)])
def test_layers_that_nothing_pays_for(
    hindsight: float, reason: str, steps_hindsight: float, regret: float
) -> None:
    verdict = judge().not_worth_it(0, answer(KEEP, hindsight=hindsight), steps_hindsight)
    assert reason in verdict.reason
    assert (verdict.hindsight, verdict.regret) == (steps_hindsight, pytest.approx(regret))
    assert_kept(verdict)


@pytest.mark.parametrize(
    ("taken", "moves", "half_life", "reason"),
    [
        (TABLES, 0, math.inf, "tables retuned, no weights move: 1.500 to 1.250"),
        (LOCAL, 0, math.inf, "tables retuned, no weights move: 1.500 to 1.250"),
        (LOCAL, 3, math.inf, "improved from where it is, 3 slots receive weights: 1.500 to 1.250"),
        (FRESH, 3, math.inf, "placed from scratch, 3 slots receive weights: 1.500 to 1.250"),
        (
            LOCAL,
            3,
            8.0,
            "improved from where it is, 3 slots receive weights: 1.500 to 1.250 on this window; "
            "aimed at where heat drifts (half-life 32 steps)",
        ),
    ],
)
def test_layers_that_change(taken: int, moves: int, half_life: float, reason: str) -> None:
    verdict = judge().changed(0, answer(taken, half_life=half_life), moves, 1.25, 1.15)
    assert verdict.reason == reason
    assert verdict.changed
    assert (verdict.par_seen, verdict.par_planned, verdict.noise_floor) == (1.5, 1.25, 1.1)
    assert verdict.bytes == 1000 * moves
    assert verdict.regret == pytest.approx(0.35)


def test_a_layer_that_has_bursts_says_what_it_is_placed_for() -> None:
    verdict = judge().changed(0, replace(answer(LOCAL), trimmed=True), 3, 1.25, 1.15)
    assert verdict.reason.endswith(" on this window; aimed at what its experts have between bursts")


def assert_kept(verdict: LayerVerdict) -> None:
    assert not verdict.changed
    np.testing.assert_equal(verdict.par_planned, verdict.par_seen)
    assert verdict.moves == verdict.bytes == 0
