"""Every manifest is valid by Kubernetes' own schemas, of an old version and the newest, without an unknown field."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
WITHOUT_SCHEMA = {"Kustomization", "ServiceMonitor", "PrometheusRule"}
"""Kinds that are not Kubernetes' own; other tests look at them."""
VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""A startup probe by gRPC is stable since 1.27."""
CONFIGURATION = "eplb.yaml"


def manifests() -> dict[str, dict[str, Any]]:
    """Every object of every file, by file and kind."""
    return {
        f"{path.relative_to(KUBERNETES)} {found['kind']}": found
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        if path.name != CONFIGURATION
        for found in yaml.safe_load_all(path.read_text())
        if found["kind"] not in WITHOUT_SCHEMA
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", manifests())
def test_a_manifest_is_what_kubernetes_takes(name: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[name], version, strict=True)


def test_there_is_a_manifest_of_every_kind() -> None:
    kinds = {name.partition(" ")[2] for name in manifests()}
    assert kinds == {"Deployment", "NetworkPolicy", "PersistentVolumeClaim", "Service"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "containers", 0, "startupProbes"), {}),
        (("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "50551"),
        (("spec", "replicas"), "one"),
    ],
    ids=["unknown field", "text for a port", "no number"],
)
def test_a_mistake_is_found(path: tuple[str | int, ...], value: object) -> None:
    wrong = copy.deepcopy(manifests()["base/deployment.yaml Deployment"])
    part: Any = wrong
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
