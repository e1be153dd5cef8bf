"""Every verdict gives a reason that fits what was decided, and its figures agree with each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import _Judge, _solved
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import FRESH, KEEP, LOCAL, TABLES, Candidate, SearchOptions

PLACEMENT = Placement.linear(1, 4, 2, 2)
TOPOLOGY = replace(Topology.flat(2), bytes_per_expert=1000)


def judge(
    seen: float = 1.4, bound: float = 1.1, par: float = 1.5, us: float = math.nan, **settings: object
) -> _Judge:
    """Of one layer; ``seen`` and ``bound`` in episodes, ``par`` and a floor of 1.1 per step."""
    tables_RLE, wanted = PLACEMENT.default_log2phy(), PlannerSettings(**settings)
    asked = SolveRequest(Window(np.ones((1, 1, 4))), PLACEMENT, tables_RLE, TOPOLOGY, wanted, SearchOptions())
    figures = (np.array([value]) for value in ([par], par, 1.1, seen, bound, us, False, False))
    return _Judge(asked, 0.3, "", *figures)


def answer(taken: int, **facts: object) -> LayerResult:
    found = Candidate(np.zeros((2, 2), np.int32), np.zeros((2, 4), np.int32), 1.2, 3)
    half_life = facts.pop("half_life", math.inf)
    return LayerResult(found, 1.4, half_life, taken, **facts)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (judge(seen=1.015), "left alone: 1.015 in episodes is at or below the threshold 1.02"),
        (
            judge(seen=1.105),
            "left alone: 1.105 in episodes is what its experts' jumps make of balanced ranks",
        ),
        (judge(par=math.nan, seen=1.0), "left alone: it received no tokens"),
        (judge(max_layers=7), "waits: only the 7 worst layers change in one decision"),
    ],
)
def test_layers_not_looked_into(given: _Judge, reason: str) -> None:
    verdict = given.not_picked(0)
    assert verdict.reason == reason
    assert_kept(verdict)
    assert verdict.us_seen is None


def test_layers_that_nothing_pays_for() -> None:
    verdict, change, _ = _solved(0, answer(KEEP), judge(us=50.0))
    assert change is None
    assert verdict.reason == "kept: nothing pays for its moves on steps that it was not fitted to"
    assert verdict.us_seen == 50.0
    assert_kept(verdict)


@pytest.mark.parametrize(
    ("taken", "moves", "facts", "reason"),
    [
        (TABLES, 0, {}, "tables retuned, no weights move: 1.500 to 1.250 on this window"),
        (LOCAL, 0, {}, "tables retuned, no weights move: 1.500 to 1.250 on this window"),
        (LOCAL, 3, {}, "improved from where it is, 3 slots receive weights: 1.500 to 1.250 on this window"),
        (FRESH, 3, {}, "placed from scratch, 3 slots receive weights: 1.500 to 1.250 on this window"),
        (FRESH, 3, {"half_life": 8.0}, "1.500 to 1.250 on this window; aimed at drift"),
        (FRESH, 3, {"trimmed": True, "optimism": 0.5}, "1.500 to 1.250 on this window; aimed at bursts"),
    ],
)
def test_layers_that_change(taken: int, moves: int, facts: dict[str, Any], reason: str) -> None:
    verdict = judge().changed(0, answer(taken, **facts), moves, 1.25, None)
    assert verdict.reason.endswith(reason)
    assert verdict.changed
    assert (verdict.par_seen, verdict.noise_floor) == (1.5, 1.1)
    assert verdict.par_planned == 1.25 + facts.get("optimism", 0.0)
    assert verdict.bytes == 1000 * moves
    assert judge().changed(0, answer(taken), moves, 1.05, None).par_planned == verdict.noise_floor


def assert_kept(verdict: LayerVerdict) -> None:
    assert not verdict.changed
    np.testing.assert_equal(verdict.par_planned, verdict.par_seen)
    assert verdict.us_planned == verdict.us_seen
    assert verdict.moves == verdict.bytes == 0
