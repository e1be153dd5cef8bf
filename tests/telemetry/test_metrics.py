"""Metrics of a deployment appear in the registry and disappear when the deployment is forgotten."""

from __future__ import annotations

import pytest

from eplb_service.telemetry.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    filled = Metrics()
    names = ("decode", "prefill")
    filled.show([("eplb_par_realised", 1.5, name, layer) for name in names for layer in "01"])
    for name in names:
        filled.observe("eplb_solve_seconds", 0.1, name)
        filled.count("eplb_plans", name, "done")
    return filled


def series_of(metrics: Metrics, deployment: str) -> set[str]:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name for sample in samples if sample.labels.get("deployment") == deployment}


def test_a_forgotten_deployment_leaves_no_series(metrics: Metrics) -> None:
    expected = {"eplb_par_realised", "eplb_solve_seconds_bucket", "eplb_plans_total"}
    assert expected <= series_of(metrics, "decode")
    before = series_of(metrics, "prefill")
    metrics.forget("decode")
    metrics.forget("unknown")
    assert series_of(metrics, "decode") == set()
    assert series_of(metrics, "prefill") == before


def test_only_the_gauges_of_the_last_update_remain(metrics: Metrics) -> None:
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_par_realised", {"deployment": "decode", "layer": "1"}) == 1.5
    metrics.show([("eplb_par_realised", 1.2, "decode", "0"), ("eplb_leads", True)])
    assert value_of("eplb_par_realised", {"deployment": "decode", "layer": "0"}) == 1.2
    assert value_of("eplb_par_realised", {"deployment": "decode", "layer": "1"}) is None
    assert value_of("eplb_leads") == 1
    assert value_of("eplb_plans_total", {"deployment": "decode", "outcome": "done"}) == 1, (
        "counters must keep their values"
    )


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_invalid_durations_are_not_observed(metrics: Metrics, seconds: float) -> None:
    metrics.observe("eplb_transfer_seconds", seconds, "decode")
    assert "eplb_transfer_seconds_count" not in series_of(metrics, "decode")


def test_counters_of_a_new_deployment_and_of_the_service_start_at_zero(metrics: Metrics) -> None:
    metrics.expect("new", ["kept"], ["done"])
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_decisions_total", {"deployment": "new", "result": "kept"}) == 0
    assert value_of("eplb_plans_total", {"deployment": "new", "outcome": "done"}) == 0
    assert value_of("eplb_steps_lost_total", {"deployment": "new"}) == 0
    assert value_of("eplb_store_failures_total") == 0


@pytest.mark.parametrize(
    ("accept", "kind"), [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")]
)
def test_the_accept_header_selects_the_format(metrics: Metrics, accept: str, kind: str) -> None:
    content_type, text = metrics.exposition(accept)
    assert content_type.startswith(kind)
    assert b"# TYPE eplb_steps_received" in text
