"""The dashboard and the rules speak of metrics and labels that there are, and lie where they are looked for."""

import re

import pytest
import yaml

from eplb_service.telemetry.metrics import Metrics, declared_series
from tests.deploy.files import DEPLOY, load
from tools.dashboard import layout
from tools.dashboard.operator_rules import operator_rules


def metric_series():
    """Every series name that a scrape can bring, with its labels."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    known = {}
    for family in Metrics().registry.collect():
        if "_process_" in family.name:
            known[family.name + ("_total" if family.type == "counter" else "")] = set()
    for kind, name, labels, _ in (row for rows in declared_series().values() for row in rows):
        for suffix in suffixes[kind]:
            known[name + suffix] = {*labels} | ({"le"} if suffix == "_bucket" else set())
    return known


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
    known = metric_series()
    named = set(re.findall(r"\beplb_\w+", expression))
    assert named <= set(known)
    labels = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", shown))
    labels |= set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", grouping))
    from_prometheus = {"job", "instance", "le"}
    assert labels <= from_prometheus.union(*(known[name] for name in named))


def test_the_dashboard_shows_every_balance_metric():
    text = (DEPLOY / "grafana/dashboards/eplb.json").read_text()
    own = [
        name for name in metric_series() if not name.endswith(("_sum", "_count")) and "_process_" not in name
    ]
    missing = [name for name in own if name not in text]
    assert missing == ["eplb_deployments"]


def test_the_dashboard_is_what_its_code_makes():
    text = (DEPLOY / "grafana/dashboards/eplb.json").read_text()
    assert text == layout.text(), "run `.venv/bin/python -m tools.dashboard`"


def test_the_operator_s_rules_are_those_of_prometheus():
    text = (DEPLOY / "kubernetes/monitoring/rules.yaml").read_text()
    assert text == operator_rules(), "run `.venv/bin/python -m tools.dashboard`"
    assert yaml.safe_load(text)["spec"] == load("prometheus/rules.yml")


def test_panels_have_a_sentence_each():
    panels = [panel for panel in layout.dashboard()["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels if not panel["description"].endswith(".")] == []


def test_the_dashboard_lies_where_grafana_looks():
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


def test_the_dashboard_is_a_configmap_that_a_cluster_s_grafana_takes_up():
    kustomization = load("grafana/kustomization.yaml")
    [made] = kustomization["configMapGenerator"]
    assert [DEPLOY / "grafana" / name for name in made["files"]] == [layout.PATH]
    assert kustomization["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    monitoring = DEPLOY / "kubernetes/monitoring"
    named = [
        (monitoring / name).resolve()
        for name in load("kubernetes/monitoring/kustomization.yaml")["resources"]
    ]
    assert DEPLOY / "grafana" in named
    # What `kubectl apply` keeps of an object in an annotation has this bound.
    assert layout.PATH.stat().st_size < 200_000
