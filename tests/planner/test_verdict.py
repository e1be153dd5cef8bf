"""Each verdict's reason matches the decision, and its figures are consistent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner import layer_verdicts
from eplb_core.planner.layer_change import layer_outcome
from eplb_core.planner.layer_figures import LayerFigures
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import FRESH, KEEP, LOCAL, TABLES, Candidate, SearchOptions

PLACEMENT = Placement.linear(1, 4, 2, 2)
TOPOLOGY = replace(Topology.flat(2), bytes_per_expert=1000)


def figures(
    seen: float = 1.4, bound: float = 1.1, par: float = 1.5, us: float = math.nan, **settings: object
) -> LayerFigures:
    """Return one layer's figures: ``seen`` and ``bound`` over episodes, ``par`` per step, and a noise floor of 1.1."""
    request = SolveRequest(
        Window(np.ones((1, 1, 4))),
        PLACEMENT,
        PLACEMENT.default_log2phy(),
        TOPOLOGY,
        PlannerSettings(**settings),
        SearchOptions(),
    )
    values = (np.array([value]) for value in ([par], par, 1.1, seen, bound, us, False, False))
    return LayerFigures(request, 0.3, "", *values)


def result(action: int, **facts: object) -> LayerResult:
    candidate = Candidate(np.zeros((2, 2), np.int32), np.zeros((2, 4), np.int32), 1.2, 3)
    half_life = facts.pop("half_life", math.inf)
    return LayerResult(candidate, 1.4, half_life, action, **facts)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (figures(seen=1.015), "left alone: its PAR over episodes, 1.015, does not exceed the threshold 1.02"),
        (
            figures(seen=1.105),
            "left alone: the volatility of its experts' heat explains its PAR over episodes, 1.105",
        ),
        (figures(par=math.nan, seen=1.0), "left alone: it received no tokens"),
        (figures(max_layers=7), "waits: a decision changes only the 7 worst layers"),
    ],
)
def test_a_layer_that_is_not_selected_does_not_change_and_its_verdict_gives_the_reason(
    before: LayerFigures, reason: str
) -> None:
    verdict = layer_verdicts.unselected_verdict(before, 0)
    assert verdict.reason == reason
    assert_kept(verdict)
    assert verdict.us_seen is None


def test_a_layer_does_not_change_if_no_change_pays_off() -> None:
    verdict, change, _ = layer_outcome(figures(us=50.0), 0, result(KEEP))
    assert change is None
    assert verdict.reason == "kept: no change pays for its moves on held-out steps"
    assert verdict.us_seen == 50.0
    assert_kept(verdict)


@pytest.mark.parametrize(
    ("action", "moves", "facts", "reason"),
    [
        (TABLES, 0, {}, "tables changed (no slot receives weights): PAR 1.500 to 1.250 on this window"),
        (LOCAL, 0, {}, "tables changed (no slot receives weights): PAR 1.500 to 1.250 on this window"),
        (
            LOCAL,
            3,
            {},
            "improved starting from its current placement (3 slots receive weights): PAR 1.500 to 1.250 on this window",
        ),
        (FRESH, 3, {}, "placed from scratch (3 slots receive weights): PAR 1.500 to 1.250 on this window"),
        (FRESH, 3, {"half_life": 8.0}, "1.500 to 1.250 on this window; planned for drift"),
        (FRESH, 3, {"trimmed": True, "optimism": 0.5}, "1.500 to 1.250 on this window; planned for bursts"),
    ],
)
def test_the_verdict_describes_the_change_of_a_layer(
    action: int, moves: int, facts: dict[str, Any], reason: str
) -> None:
    verdict = layer_verdicts.change_verdict(figures(), 0, result(action, **facts), moves, 1.25, None)
    assert verdict.reason.endswith(reason)
    assert verdict.changed
    assert (verdict.par_seen, verdict.noise_floor) == (1.5, 1.1)
    assert verdict.par_planned == 1.25 + facts.get("optimism", 0.0)
    assert verdict.bytes == 1000 * moves
    balanced = layer_verdicts.change_verdict(figures(), 0, result(action), moves, 1.05, None)
    assert balanced.par_planned == verdict.noise_floor


def assert_kept(verdict: LayerVerdict) -> None:
    assert not verdict.changed
    np.testing.assert_equal(verdict.par_planned, verdict.par_seen)
    assert verdict.us_planned == verdict.us_seen
    assert verdict.moves == verdict.bytes == 0
