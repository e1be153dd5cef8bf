"""The observer records balance over time, the last decision and plan, and each rank's last message."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eplb_core.planner.plan import LayerPlan, Plan
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.wire.agent import Heartbeat
from eplb_service.control.core.deployment import Totals
from eplb_service.control.server.observer import Observer
from eplb_service.telemetry.metrics import Metrics


def verdict(layer: int, planned: float, floor: float) -> LayerVerdict:
    return LayerVerdict(layer, 1.5, planned, floor, 1, True, "placed again")


def deployment(par: float, assembled: int, left_alone: float | None = None) -> Any:
    heat = SimpleNamespace(served_par=lambda newest: np.array([[par, math.nan]]), steps=64)
    worth = None if left_alone is None else SimpleNamespace(par_left_alone=left_alone)
    return SimpleNamespace(
        name="decode",
        heat=heat,
        live=SimpleNamespace(layer_epochs=(0, 0)),
        connected=[0],
        assembled=assembled,
        session=SimpleNamespace(worth=worth),
        totals=Totals(layers_switched=4),
    )


def test_points_take_planned_par_and_noise_floor_from_the_last_decision() -> None:
    observer = Observer(wall_clock=iter([100.0, 101.0, 102.0, 103.0]).__next__, clock=lambda: 0.0)
    observer.tick(deployment(1.4, 16))
    layer = LayerPlan(0, np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32), np.ones((2, 5), np.int32))
    observer.decided("decode", Plan((layer,), (verdict(0, 1.2, 1.1), verdict(1, math.nan, math.nan))), 0.25)
    observer.tick(deployment(1.3, 32, left_alone=1.8))
    observer.tick(deployment(math.nan, 48))
    first, second = observer.of("decode").series.points
    assert (first.at, first.par, first.layers_switched) == (100.0, 1.4, 4)
    assert math.isnan(first.par_planned)
    assert math.isnan(first.noise_floor)
    assert (second.par, second.par_planned, second.noise_floor) == (1.3, 1.2, 1.1)
    assert math.isnan(first.par_left_alone)
    assert second.par_left_alone == 1.8


def test_no_point_is_recorded_while_no_step_is_assembled() -> None:
    seconds = iter([5.0, 5.0, 20.0, 30.0])
    observer = Observer(wall_clock=lambda: 0.0, clock=seconds.__next__)
    assert observer.idle_seconds("decode") is None
    observer.tick(deployment(1.4, 16))
    assert observer.idle_seconds("decode") == 0
    observer.tick(deployment(1.2, 16))
    assert observer.of("decode").charted
    assert len(observer.of("decode").series.points) == 1
    assert observer.idle_seconds("decode") == 15


def test_the_last_plan_is_kept_when_later_decisions_keep_every_layer() -> None:
    observer = Observer()
    observer.offered("decode", 6)
    observer.decided("decode", Plan((), (verdict(0, 1.2, 1.1),)), 0.1)
    observer.offered("decode", 7)
    observer.decided("decode", Plan((), (verdict(0, 1.3, 1.1),)), 0.1)
    records = observer.of("decode")
    assert records.last_plan is not None
    assert records.last_decision is not None
    assert (records.last_plan.plan_id, records.last_plan.verdicts[0].par_planned) == (7, 1.2)
    assert (records.last_decision.plan_id, records.last_decision.verdicts[0].par_planned) == (0, 1.3)
    observer.regrouped("decode")
    assert observer.of("decode").last_plan is None
    observer.forget("decode")
    assert not observer.of("decode").series.points


def test_silence_is_measured_from_the_last_message() -> None:
    now = [10.0]
    observer = Observer(clock=lambda: now[0])
    assert observer.silent_seconds("decode", 3) is None
    observer.heard("decode", 3)
    now[0] = 14.5
    assert observer.silent_seconds("decode", 3) == 4.5


def test_agent_calls_are_counted_between_heartbeats() -> None:
    observer = Observer()
    metrics = Metrics()
    metrics.expect("decode", [], [])

    def totals_after(calls: int, micros: int, votes: int) -> tuple[float | None, ...]:
        """Count a heartbeat and return the total calls, the seconds spent in them, and the seconds spent in votes."""
        message = Heartbeat(calls=calls, call_micros=micros, vote_micros=votes)
        observer.count_calls("decode", 3, message, metrics)
        return tuple(
            metrics.registry.get_sample_value(f"eplb_agent_{name}_total", {"deployment": "decode"})
            for name in ("calls", "call_seconds", "vote_seconds")
        )

    assert totals_after(100, 5000, 900) == (0, 0, 0), "the first heartbeat only sets the baseline"
    assert totals_after(120, 6000, 1000) == pytest.approx((20, 1e-3, 1e-4))
    assert totals_after(120, 6000, 1000) == pytest.approx((20, 1e-3, 1e-4))
    assert totals_after(5, 300, 30) == pytest.approx((20, 1e-3, 1e-4)), "the agent has restarted"
    assert totals_after(7, 500, 40) == pytest.approx((22, 1.2e-3, 1.1e-4))
    observer.regrouped("decode")
    assert totals_after(9, 600, 50) == pytest.approx((22, 1.2e-3, 1.1e-4))
