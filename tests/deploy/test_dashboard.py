"""Tests of the dashboard and the alert rules: their metrics and labels exist, and Grafana finds the files."""

import re

import pytest
import yaml

from eplb_service.telemetry.metrics import Metrics, declared_series
from tests.deploy.files import DEPLOY, load
from tools.dashboard import layout
from tools.dashboard.operator_rules import operator_rules


def metric_series():
    """Return the labels of every series that a scrape can contain."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    series = {}
    for family in Metrics().registry.collect():
        if "_process_" in family.name:
            series[family.name + ("_total" if family.type == "counter" else "")] = set()
    for kind, name, labels, _ in (row for rows in declared_series().values() for row in rows):
        for suffix in suffixes[kind]:
            series[name + suffix] = {*labels} | ({"le"} if suffix == "_bucket" else set())
    return series


def expressions():
    dashboard = layout.dashboard()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], target["legendFormat"], id=panel["title"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield pytest.param(variable["definition"], "", id=variable["name"])
    for group in load("prometheus/rules.yml")["groups"]:
        for rule in group["rules"]:
            texts = " ".join(rule["annotations"].values()).replace("$labels.", "")
            yield pytest.param(rule["expr"], texts, id=rule["alert"])


@pytest.mark.parametrize(("expression", "shown"), list(expressions()))
def test_expressions_name_metrics_and_labels_that_exist(expression, shown):
    series = metric_series()
    named = set(re.findall(r"\beplb_\w+", expression))
    assert named <= set(series)
    labels = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", shown))
    labels |= set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", grouping))
    from_prometheus = {"job", "instance", "le"}
    assert labels <= from_prometheus.union(*(series[name] for name in named))


def test_the_dashboard_shows_every_balance_metric():
    text = (DEPLOY / "grafana/dashboards/eplb.json").read_text()
    names = [
        name for name in metric_series() if not name.endswith(("_sum", "_count")) and "_process_" not in name
    ]
    missing = [name for name in names if name not in text]
    assert missing == ["eplb_deployments"]


def test_the_dashboard_file_is_up_to_date():
    text = (DEPLOY / "grafana/dashboards/eplb.json").read_text()
    assert text == layout.text(), "run `.venv/bin/python -m tools.dashboard`"


def test_the_operator_and_prometheus_have_the_same_rules():
    text = (DEPLOY / "kubernetes/monitoring/rules.yaml").read_text()
    assert text == operator_rules(), "run `.venv/bin/python -m tools.dashboard`"
    assert yaml.safe_load(text)["spec"] == load("prometheus/rules.yml")


def test_every_panel_has_a_one_sentence_description():
    panels = [panel for panel in layout.dashboard()["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels if not panel["description"].endswith(".")] == []


def test_grafana_finds_the_dashboard():
    compose = load("compose.yaml")
    mounts = dict(
        volume.split(":")[:2]
        for volume in compose["services"]["grafana"]["volumes"]
        if volume.startswith(".")
    )
    [provider] = load("grafana/provisioning/dashboards/eplb.yaml")["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    for source in mounts:
        assert (DEPLOY / source).is_dir()


def test_a_clusters_grafana_loads_the_dashboard_configmap():
    kustomization = load("grafana/kustomization.yaml")
    [generator] = kustomization["configMapGenerator"]
    assert [DEPLOY / "grafana" / name for name in generator["files"]] == [layout.PATH]
    assert kustomization["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    monitoring = DEPLOY / "kubernetes/monitoring"
    named = [
        (monitoring / name).resolve()
        for name in load("kubernetes/monitoring/kustomization.yaml")["resources"]
    ]
    assert DEPLOY / "grafana" in named
    # `kubectl apply` stores the object in an annotation of limited size.
    assert layout.PATH.stat().st_size < 200_000
