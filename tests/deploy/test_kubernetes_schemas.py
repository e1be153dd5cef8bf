"""Every manifest is valid by Kubernetes' own schemas, of an old version and the newest, without an unknown field."""

from __future__ import annotations

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import (
    KUBERNETES,
    OPERATOR_SCHEMAS,
    VERSIONS,
    manifests,
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", manifests())
def test_a_manifest_is_what_kubernetes_takes(name: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[name], version, strict=True)


def test_a_patch_is_checked_as_what_it_makes() -> None:
    two = manifests()["ha/two-replicas.yaml Deployment"]["spec"]
    assert two["replicas"] == 2
    assert two["template"]["spec"]["containers"][0]["image"]


def test_of_two_replicas_one_is_selected() -> None:
    """As the patches make it; where there is a kubectl, another test has it build the same."""
    selector = manifests()["ha/leader-only.yaml Service"]["spec"]["selector"]
    assert selector["eplb-service/leads"] == "true"
    assert manifests()["base/service.yaml Service"]["spec"]["selector"].items() < selector.items()


def test_what_the_prometheus_operator_gets_is_what_it_takes() -> None:
    objects = {
        one["kind"]: one
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if str(one.get("apiVersion", "")).startswith("monitoring.coreos.com/")
    }
    assert objects.keys() == {"ServiceMonitor", "PrometheusRule"} == OPERATOR_SCHEMAS.keys() - {"$defs"}
    for kind, found in objects.items():
        schema = {"$defs": OPERATOR_SCHEMAS["$defs"], **OPERATOR_SCHEMAS[kind]}
        jsonschema.Draft202012Validator(schema).validate(found)
