"""What clusters with the Prometheus operator get is what its custom resources take, without an unknown field."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.files import DEPLOY

SCHEMAS = yaml.safe_load((Path(__file__).parent / "prometheus_operator.yaml").read_text())
OBJECTS = {
    one["kind"]: one
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
    if str(one.get("apiVersion", "")).startswith("monitoring.coreos.com/")
}


def validate(found: dict[str, Any]) -> None:
    schema = {"$defs": SCHEMAS["$defs"], **SCHEMAS[found["kind"]]}
    jsonschema.Draft202012Validator(schema).validate(found)


def test_both_kinds_are_there_and_no_other() -> None:
    assert OBJECTS.keys() == {"ServiceMonitor", "PrometheusRule"} == SCHEMAS.keys() - {"$defs"}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_is_what_the_operator_takes(kind: str) -> None:
    validate(OBJECTS[kind])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ServiceMonitor", ("apiVersion",), "monitoring.coreos.com/v2"),
        ("ServiceMonitor", ("spec", "selectors"), {}),
        ("ServiceMonitor", ("spec", "endpoints"), []),
        ("ServiceMonitor", ("spec", "endpoints", 0, "port"), 9464),
        ("ServiceMonitor", ("spec", "endpoints", 0, "intervall"), "15s"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "interval"), "15 s"),
        ("ServiceMonitor", ("metadata", "name"), "Eplb"),
        ("PrometheusRule", ("spec", "groups", 0, "name"), ""),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "for"), "1 minute"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "severity"), "warning"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "labels", "severity"), 1),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "record"), "eplb:alerts"),
    ],
)
def test_a_mistake_is_found(kind: str, path: tuple[str | int, ...], value: object) -> None:
    wrong = copy.deepcopy(OBJECTS[kind])
    part: Any = wrong
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong)


def test_the_monitor_finds_a_service_by_its_label_and_port() -> None:
    spec = OBJECTS["ServiceMonitor"]["spec"]
    found = [
        port["name"]
        for name in ("service", "metrics")
        for service in [yaml.safe_load((DEPLOY / f"kubernetes/base/{name}.yaml").read_text())]
        if spec["selector"]["matchLabels"].items() <= service["metadata"].get("labels", {}).items()
        for port in service["spec"]["ports"]
    ]
    assert {one["port"] for one in spec["endpoints"]} <= set(found)
