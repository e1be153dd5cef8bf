"""Every number that milliseconds rest on is named, with where it comes from."""

from __future__ import annotations

from dataclasses import replace

from eplb_service.cost.curve import FitQuality
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.split_cost import SplitCost
from eplb_service.replay.assumptions import assumptions
from eplb_service.replay.costs import Costs
from tests.cost.curves import H200


def named(costs, given=()):
    return {assumption.name: assumption for assumption in assumptions(costs, given)}


def test_without_a_step_nothing_is_assumed_but_that_time_follows_tokens():
    assert list(named(Costs())) == ["cost_curve"]
    assert named(Costs())["cost_curve"].source == "assumed"
    assert "linear" in named(Costs())["cost_curve"].value


def test_with_a_step_all_that_enters_is_listed_and_what_was_given_says_so():
    found = named(Costs(step_ms=30, bandwidth=25e9), given=("step_ms", "bandwidth"))
    assert set(found) == {
        "cost_curve",
        "step_ms",
        "moe_share",
        "solve_ms",
        "bandwidth",
        "commit_ms",
        "bytes_per_expert",
    }
    assert str(found["bandwidth"]) == "bandwidth 25 GB/s (given)"
    assert found["moe_share"].source == "assumed"


def test_a_curve_takes_the_place_of_the_moe_share_and_brings_its_source():
    fitted = replace(H200, fit=FitQuality(56, 14, 0.023, 0.05, 0.09))
    found = named(Costs(step_ms=30, curve=fitted), given=("step_ms",))
    assert "moe_share" not in found
    assert found["cost_curve"].source.startswith("H200, 7168 x 2048, fp8; median error 2.3%")
    assert "no fit is known" in named(Costs(curve=H200))["cost_curve"].source


def test_what_a_stepwise_split_takes_is_listed_under_a_curve():
    settings = PlannerSettings(split="step")
    costs = Costs(curve=H200, split=SplitCost.of(settings, 8, 64))
    assert named(costs)["split_overhead_us"].source == "assumed"
    assert "1,792 bytes of counts to each rank" in named(costs)["split_overhead_us"].value
    stated = SplitCost.of(replace(settings, split_overhead_us=3.0), 8, 64)
    assert named(replace(costs, split=stated))["split_overhead_us"].source == "given"
    assert "split_overhead_us" not in named(replace(costs, curve=None))
