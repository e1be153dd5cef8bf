"""Alerts from ``deploy/prometheus/rules.yml`` as a ``PrometheusRule`` object for the Prometheus operator."""

from __future__ import annotations

from pathlib import Path

_DEPLOY = Path(__file__).parents[2] / "deploy"
RULES_PATH = _DEPLOY / "kubernetes/monitoring/rules.yaml"
_HEAD = """\
# Generated from deploy/prometheus/rules.yml by `python -m tools.dashboard`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: eplb
  labels:
    app.kubernetes.io/name: eplb-service
spec:
"""


def operator_rules() -> str:
    """Return the file's content: the rule groups, indented below the object's ``spec``."""
    rules = (_DEPLOY / "prometheus/rules.yml").read_text()
    groups = rules[rules.index("groups:") :]
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))
