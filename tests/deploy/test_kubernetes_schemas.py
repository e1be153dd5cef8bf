"""Every manifest passes the strict Kubernetes schemas of an old version and of the newest."""

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
def test_every_manifest_passes_the_kubernetes_schemas(name: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[name], version, strict=True)


def test_a_patch_is_applied_before_validation() -> None:
    two = manifests()["ha/two-replicas.yaml Deployment"]["spec"]
    assert two["replicas"] == 2
    assert two["template"]["spec"]["containers"][0]["image"]


def test_only_the_leader_of_two_replicas_is_selected() -> None:
    """The patches are merged here. ``test_kubernetes.py`` builds the same objects with kubectl if it is installed."""
    selector = manifests()["ha/leader-only.yaml Service"]["spec"]["selector"]
    assert selector["eplb-service/leads"] == "true"
    assert manifests()["base/service.yaml Service"]["spec"]["selector"].items() < selector.items()


def test_monitoring_objects_pass_the_prometheus_operators_schemas() -> None:
    objects = {
        item["kind"]: item
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        for item in yaml.safe_load_all(path.read_text())
        if str(item.get("apiVersion", "")).startswith("monitoring.coreos.com/")
    }
    assert objects.keys() == {"ServiceMonitor", "PrometheusRule"} == OPERATOR_SCHEMAS.keys() - {"$defs"}
    for kind, manifest in objects.items():
        schema = {"$defs": OPERATOR_SCHEMAS["$defs"], **OPERATOR_SCHEMAS[kind]}
        jsonschema.Draft202012Validator(schema).validate(manifest)
