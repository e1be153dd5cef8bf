"""Reported figures must be found in the registry, and gone once their deployment is."""

from __future__ import annotations

import pytest

from eplb_service.telemetry.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    reported = Metrics()
    names = ("decode", "prefill")
    reported.show([("eplb_par_realised", 1.5, name, layer) for name in names for layer in "01"])
    for name in names:
        reported.observe("eplb_solve_seconds", 0.1, name)
        reported.count("eplb_plans", name, "done")
    return reported


def series_of(metrics: Metrics, deployment: str) -> set[str]:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name for sample in samples if sample.labels.get("deployment") == deployment}


def test_a_deployment_that_is_forgotten_leaves_no_series(metrics: Metrics) -> None:
    known = {"eplb_par_realised", "eplb_solve_seconds_bucket", "eplb_plans_total"}
    assert known <= series_of(metrics, "decode")
    before = series_of(metrics, "prefill")
    metrics.forget("decode")
    metrics.forget("never known")
    assert series_of(metrics, "decode") == set()
    assert series_of(metrics, "prefill") == before


def test_gauges_are_those_that_are_shown_last_and_no_other(metrics: Metrics) -> None:
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_par_realised", {"deployment": "decode", "layer": "1"}) == 1.5
    metrics.show([("eplb_par_realised", 1.2, "decode", "0"), ("eplb_leads", True)])
    assert value_of("eplb_par_realised", {"deployment": "decode", "layer": "0"}) == 1.2
    assert value_of("eplb_par_realised", {"deployment": "decode", "layer": "1"}) is None
    assert value_of("eplb_leads") == 1
    assert value_of("eplb_plans_total", {"deployment": "decode", "outcome": "done"}) == 1, "no gauge"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_seconds_that_cannot_be_are_left_out(metrics: Metrics, seconds: float) -> None:
    metrics.observe("eplb_transfer_seconds", seconds, "decode")
    assert "eplb_transfer_seconds_count" not in series_of(metrics, "decode")


def test_counters_of_a_new_deployment_and_of_the_service_begin_at_zero(metrics: Metrics) -> None:
    metrics.expect("new", ["kept"], ["done"])
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_decisions_total", {"deployment": "new", "result": "kept"}) == 0
    assert value_of("eplb_plans_total", {"deployment": "new", "outcome": "done"}) == 0
    assert value_of("eplb_steps_lost_total", {"deployment": "new"}) == 0
    assert value_of("eplb_store_failures_total") == 0


@pytest.mark.parametrize(
    ("accept", "kind"), [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")]
)
def test_the_reader_chooses_the_format(metrics: Metrics, accept: str, kind: str) -> None:
    found, text = metrics.exposition(accept)
    assert found.startswith(kind)
    assert b"# TYPE eplb_steps_received" in text
