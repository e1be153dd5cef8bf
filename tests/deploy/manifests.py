"""The Kubernetes manifests, with patches applied, and the schema versions to validate them against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
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


OPERATOR_SCHEMAS = yaml.safe_load((Path(__file__).parent / "prometheus_operator.yaml").read_text())
