"""Writes deploy/grafana/dashboards/eplb.json."""

from pathlib import Path

from tools.dashboard.layout import text

PATH = Path(__file__).parents[2] / "deploy/grafana/dashboards/eplb.json"

PATH.write_text(text())
