"""Layers are solved apart from each other: by any number of threads, within a budget, each failing by itself."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from eplb_service.placement import Placement, check_layer
from eplb_service.solver import engine
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import OutOfTimeError, SolverError, solve_many
from eplb_service.solver.model import FRESH
from tests.solver.asked import SEARCH, solve
from tests.solver.layers_of import Case

LAYERS, EXPERTS, RANKS, SLOTS = 5, 32, 8, 5
HEAT_LNE = np.random.default_rng(3).gamma(0.6, 100, (LAYERS, 6, EXPERTS))


def solved(
    heat_LNE: np.ndarray, threads: int | None = 1, budget_ms: float | None = None
) -> list[Answer | SolverError]:
    layers = len(heat_LNE)
    deployed = Placement.linear(layers, EXPERTS, RANKS, SLOTS)
    return solve_many(
        heat_LNE,
        deployed.phy2log_LRS,
        deployed.default_log2phy().transpose(1, 0, 2),
        np.full((layers, RANKS, EXPERTS), 1 / RANKS),
        SEARCH._replace(annealing_tries=100),
        np.array([np.inf, 1.0]),
        0.0,
        np.arange(layers) % 2 == 0,
        threads,
        budget_ms,
    )


def assert_same(one: Answer, other: Answer) -> None:
    assert (one.taken, one.half_life, one.par_before, one.hindsight) == (
        other.taken,
        other.half_life,
        other.par_before,
        other.hindsight,
    )
    for mine, theirs in zip(one.found, other.found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("threads", [2, 3, 1000, None])
def test_threads_change_nothing(threads: int | None) -> None:
    for one, other in zip(solved(HEAT_LNE), solved(HEAT_LNE, threads), strict=True):
        assert_same(one, other)


def test_other_layers_change_nothing() -> None:
    together = solved(HEAT_LNE)
    for layer in (0, 2, 4):
        assert_same(solved(HEAT_LNE[layer : layer + 1])[0], together[layer])


def test_no_more_threads_start_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    honest = engine.ThreadPoolExecutor

    def pool(workers: int, **options: object) -> object:
        asked.append(workers)
        return honest(workers, **options)

    monkeypatch.setattr(engine, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    solved(HEAT_LNE, threads=100_000)
    assert asked == [3]


def digest() -> str:
    found = [answer.found for answer in solved(HEAT_LNE[:2])]
    return hashlib.sha256(b"".join(part.tobytes() for one in found for part in one[:2])).hexdigest()


def test_another_process_with_another_hash_seed_finds_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.solver.test_engine import digest; print(digest())"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=170,
    )
    assert done.stdout.strip() == digest()


def test_the_caller_keeps_its_arrays() -> None:
    heat_LNE = HEAT_LNE.copy()
    heat_LNE.setflags(write=False)
    solved(heat_LNE)
    np.testing.assert_array_equal(heat_LNE, HEAT_LNE)


def test_one_failing_layer_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = engine.solve_layer

    def failing(heat_NE: np.ndarray, *arguments: object) -> Answer:
        if np.array_equal(heat_NE, HEAT_LNE[1]):
            raise ZeroDivisionError("no ranks")
        return honest(heat_NE, *arguments)

    whole = solved(HEAT_LNE)
    monkeypatch.setattr(engine, "solve_layer", failing)
    broken = solved(HEAT_LNE, threads=2)
    assert isinstance(broken[1], SolverError)
    assert not isinstance(broken[1], OutOfTimeError)
    assert str(broken[1]) == "ZeroDivisionError: no ranks"
    for layer in (0, 2, 3, 4):
        assert_same(whole[layer], broken[layer])


def test_layers_past_the_budget_have_it_as_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.chain([0.0, 0.0, 0.001], itertools.repeat(0.003))
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(now))
    answers = solved(HEAT_LNE, budget_ms=2.5)
    assert [isinstance(answer, OutOfTimeError) for answer in answers] == [False, False, True, True, True]
    assert str(answers[2]) == "the budget of 2.5 ms was spent"


def test_one_seed_gives_one_answer() -> None:
    case = Case(8, 2, np.random.default_rng(4).gamma(0.5, 100, (4, 12)))
    search = SEARCH._replace(annealing_tries=300, seed=7)
    first, second = (solve(case, search)[1][0] for _ in range(2))
    assert_same(first, second)


def test_what_is_left_of_a_budget_improves_layers_placed_from_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(calls) * 0.001)
    before = solved(HEAT_LNE)
    after = solved(HEAT_LNE, budget_ms=30.0)
    gained = []
    for one, other in zip(before, after, strict=True):
        assert isinstance(one, Answer)
        assert isinstance(other, Answer)
        if one.taken != FRESH:
            assert_same(one, other)
            continue
        assert other.taken == FRESH
        assert other.found.par <= one.found.par
        assert other.fresh.par <= one.fresh.par
        check_layer(other.found.phy2log_RS, EXPERTS)
        gained.append(one.found.par - other.found.par)
    assert max(gained) > 0.001
