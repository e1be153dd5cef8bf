"""Grafana dashboard with the panels of ``rows.yaml``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

PATH = Path(__file__).parents[2] / "deploy/grafana/dashboards/eplb.json"
_ROWS = Path(__file__).parent / "rows.yaml"
_PLACEHOLDERS = {
    "WHO": "{{deployment}} @ {{instance}}",
    "CHOSEN": 'deployment=~"$deployment", instance=~"$instance"',
    "INSTANCE": 'instance=~"$instance"',
    "INTERVAL": "$__rate_interval",
}
"""Placeholders in queries and legends in ``rows.yaml``, with their replacements."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24
_LINE = {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 0, "showPoints": "never", "spanNulls": False}
_BARS = {"drawStyle": "bars", "lineWidth": 1, "fillOpacity": 60, "showPoints": "never"}
_STYLES = {
    "line": _LINE,
    "stairs": {**_LINE, "lineInterpolation": "stepAfter"},
    "bars": {**_BARS, "stacking": {"mode": "normal"}},
}
_LEGEND = {"displayMode": "list", "placement": "bottom"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "orientation": "auto",
    },
    "timeseries": {
        "legend": {**_LEGEND, "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "status-history": {
        "legend": {**_LEGEND, "showLegend": False},
        "showValue": "never",
        "rowHeight": 0.9,
        "colWidth": 1,
        "tooltip": {"mode": "single"},
    },
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    variables = [
        {**datasource, "current": {}, "hide": 0},
        _variable("instance", "Service", "eplb_build_info"),
        _variable("deployment", "Deployment", f"eplb_agents_connected{{{_PLACEHOLDERS['INSTANCE']}}}"),
    ]
    return {
        "uid": "eplb",
        "title": "Expert-parallel load balance",
        "description": "Balance, decisions and expert moves for every deployment, layer and rank.",
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
        "templating": {"list": variables},
        "panels": _panels(),
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _variable(label: str, title: str, metric: str) -> dict[str, Any]:
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
    """Return all panels in reading order, from left to right and row by row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in yaml.safe_load(_ROWS.read_text()).items():
        head = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False}
        panels.append({**head, "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}, "panels": []})
        x, y, tallest = 0, y + 1, 0
        for panel in row:
            width, height = panel["size"]
            if x + width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": width, "h": height}))
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return panels


def _panel(panel: dict[str, Any], number: int, grid_position: dict[str, int]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel["text"],
        "datasource": _DATASOURCE,
        "gridPos": grid_position,
        "fieldConfig": {"defaults": _defaults(panel, kind), "overrides": []},
        "options": _OPTIONS[kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": _expand(query),
                "legendFormat": _expand(legend),
                "instant": kind == "stat",
                "range": kind != "stat",
            }
            for index, (legend, query) in enumerate(panel["queries"].items())
        ],
    }


def _defaults(panel: dict[str, Any], kind: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short")}
    if "decimals" in panel:
        defaults["decimals"] = panel["decimals"]
    if "least" in panel:
        defaults["min"] = panel["least"]
    if "thresholds" in panel:
        steps = [{"color": colour, "value": value} for value, colour in panel["thresholds"]]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["color"] = {"mode": "thresholds"}
    if "names" in panel:
        names = enumerate(panel["names"].items())
        options = {value: {"text": text, "index": index} for index, (value, text) in names}
        defaults["mappings"] = [{"type": "value", "options": options}]
    if kind == "timeseries":
        defaults["custom"] = _STYLES[panel.get("style", "line")]
    if kind == "status-history":
        defaults["custom"] = {"fillOpacity": 90, "lineWidth": 0}
    return defaults


def _expand(template: str) -> str:
    return re.sub("|".join(_PLACEHOLDERS), lambda word: _PLACEHOLDERS[word[0]], template)
