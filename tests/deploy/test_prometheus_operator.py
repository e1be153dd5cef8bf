"""What clusters with the Prometheus operator get is what its custom resources take, without an unknown field."""

from __future__ import annotations

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
