"""Loaders of the files under ``deploy/``, and the ports and settings that they must match."""

from pathlib import Path

import pytest
import yaml

from eplb_service.control.server.settings import ServiceSettings, load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GRPC_PORT = int(ServiceSettings.model_fields["listen"].default.rpartition(":")[2])
METRICS_PORT = int(ServiceSettings.model_fields["metrics"].default.rpartition(":")[2])
HEALTH_PORT = 50552
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def load(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def kubernetes_objects():
    for folder in ("base", "examples"):
        for path in sorted((DEPLOY / "kubernetes" / folder).glob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text()):
                if "kind" in document:
                    yield pytest.param(document, id=f"{folder}/{path.name}")


DEPLOYMENTS = [item for item in kubernetes_objects() if item.values[0]["kind"] == "Deployment"]


def settings_from(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load_settings({}, environment=environment)
