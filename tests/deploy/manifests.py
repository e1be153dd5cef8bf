"""The Kubernetes manifests with their patches applied, and the schema versions for validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
WITHOUT_SCHEMA = {"Kustomization", "ServiceMonitor", "PrometheusRule"}
"""Kinds that Kubernetes does not define. The Prometheus operator publishes separate schemas."""
VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""gRPC startup probes are stable since 1.27."""
CONFIGURATION = "eplb.yaml"


def manifests() -> dict[str, dict[str, Any]]:
    """Return every object by file and kind. Patches are applied to the base objects that they change."""
    objects = {
        f"{path.relative_to(KUBERNETES)} {item['kind']}": item
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        if path.name != CONFIGURATION
        for item in yaml.safe_load_all(path.read_text())
        if item["kind"] not in WITHOUT_SCHEMA
    }
    base = {key_of(item): item for name, item in objects.items() if name.startswith("base/")}
    return {
        name: patched(base[key_of(item)], item) if name.partition(" ")[0] in PATCHES else item
        for name, item in objects.items()
    }


PATCHES = {
    str((path.parent / patch["path"]).relative_to(KUBERNETES))
    for path in KUBERNETES.rglob("kustomization.yaml")
    for patch in yaml.safe_load(path.read_text()).get("patches", [])
    if "path" in patch
}


def key_of(manifest: dict[str, Any]) -> tuple[str, str]:
    """Return the kind and name of an object."""
    return manifest["kind"], manifest["metadata"]["name"]


def patched(base: Any, patch: Any) -> Any:
    """Merge ``patch`` into ``base`` strategically: lists of named items merge by name, other lists are replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = {**base, **{key: patched(base.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in [*base, *patch]):
        by_name = {item["name"]: item for item in base}
        return list(
            {**by_name, **{item["name"]: patched(by_name.get(item["name"]), item) for item in patch}}.values()
        )
    return patch


OPERATOR_SCHEMAS = yaml.safe_load((Path(__file__).parent / "prometheus_operator.yaml").read_text())
