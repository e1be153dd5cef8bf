"""Lays the panels out as Grafana reads a dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.dashboard.panel import Panel
from tools.dashboard.rows import ROWS

PATH = Path(__file__).parents[2] / "deploy/grafana/dashboards/eplb.json"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ROW_HEIGHT, _WIDTH = 1, 24


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana reads it."""
    return {
        "uid": "eplb",
        "title": "Expert-parallel load balance",
        "description": "Balance of every deployment, layer and rank, what was decided, and what moved.",
        "tags": ["eplb"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "version": 2,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [_datasource(), _variable("instance", "Service"), _variable("deployment", "Deployment")]
        },
        "panels": _panels(),
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _variable(label: str, title: str) -> dict[str, Any]:
    metric = "eplb_build_info" if label == "instance" else 'eplb_agents_connected{instance=~"$instance"}'
    query = f"label_values({metric}, {label})"
    return {
        "name": label,
        "label": title,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": label},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> list[dict[str, Any]]:
    """All panels in reading order, from left to right and row by row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": _WIDTH, "h": _ROW_HEIGHT}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        x, y, tallest = 0, y + _ROW_HEIGHT, 0
        for panel in row:
            width, height = panel.size
            if x + width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": width, "h": height}))
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return panels


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.thresholds:
        steps = [{"color": colour, "value": value} for value, colour in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["color"] = {"mode": "thresholds"}
    if panel.names:
        options = {
            value: {"text": text, "index": index} for index, (value, text) in enumerate(panel.names.items())
        }
        defaults["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        defaults["custom"] = panel.style
    if panel.kind == "status-history":
        defaults["custom"] = {"fillOpacity": 90, "lineWidth": 0}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "orientation": "auto",
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "status-history": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "showValue": "never",
        "rowHeight": 0.9,
        "colWidth": 1,
        "tooltip": {"mode": "single"},
    },
}


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"
