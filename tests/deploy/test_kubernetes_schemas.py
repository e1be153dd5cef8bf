"""Every manifest is valid by Kubernetes' own schemas, of an old version and the newest, without an unknown field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
WITHOUT_SCHEMA = {"Kustomization", "ServiceMonitor", "PrometheusRule"}
"""Kinds that are not Kubernetes' own; the Prometheus operator's have schemas of their own."""
VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""A startup probe by gRPC is stable since 1.27."""
CONFIGURATION = "eplb.yaml"


def manifests() -> dict[str, dict[str, Any]]:
    """Every object of every file, by file and kind; a patch as what it makes of the object of the base."""
    found = {
        f"{path.relative_to(KUBERNETES)} {one['kind']}": one
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        if path.name != CONFIGURATION
        for one in yaml.safe_load_all(path.read_text())
        if one["kind"] not in WITHOUT_SCHEMA
    }
    base = {named(one): one for name, one in found.items() if name.startswith("base/")}
    return {
        name: patched(base[named(one)], one) if name.partition(" ")[0] in PATCHES else one
        for name, one in found.items()
    }


PATCHES = {
    str((path.parent / patch["path"]).relative_to(KUBERNETES))
    for path in KUBERNETES.rglob("kustomization.yaml")
    for patch in yaml.safe_load(path.read_text()).get("patches", [])
    if "path" in patch
}


def named(found: dict[str, Any]) -> tuple[str, str]:
    """Kind and name of an object."""
    return found["kind"], found["metadata"]["name"]


def patched(found: Any, patch: Any) -> Any:
    """What a strategic merge makes of ``found``: lists of what has names are merged by name, others are replaced."""
    if isinstance(found, dict) and isinstance(patch, dict):
        merged = {**found, **{key: patched(found.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(found, list) and isinstance(patch, list) and all("name" in one for one in [*found, *patch]):
        by_name = {one["name"]: one for one in found}
        return list(
            {**by_name, **{one["name"]: patched(by_name.get(one["name"]), one) for one in patch}}.values()
        )
    return patch


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


OPERATOR_SCHEMAS = yaml.safe_load((Path(__file__).parent / "prometheus_operator.yaml").read_text())


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
