"""The reference of the service's metrics, from the registry that a scrape reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.docs_reference.markdown import escaped, table


@dataclass(frozen=True)
class MetricEntry:
    """One metric under the name that queries use: of a histogram without ``_bucket``, ``_sum`` and ``_count``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics() -> dict[str, list[MetricEntry]]:
    """Every metric of the service but those of its process, by what it is of, in the order in which they are made."""
    from eplb_service.telemetry.metrics import Metrics

    made = Metrics()
    groups = {
        "Balance": made.balance,
        "What balancing is worth": made.worth,
        "Decisions and plans": made.plans,
        "Agents and heat": made.agents,
        "The service": made.service,
    }
    return {
        heading: [entry for metric in vars(group).values() for entry in _entries(metric)]
        for heading, group in groups.items()
    }


def _entries(metric: Any) -> list[MetricEntry]:
    """Of a counter, gauge or histogram; nothing of whatever else there is."""
    labels = getattr(metric, "_labelnames", None)
    if labels is None:
        return []
    return [
        MetricEntry(
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            tuple(labels),
            family.documentation,
        )
        for family in metric.describe()
    ]


def metrics_page() -> str:
    """``reference/metrics.md``."""
    parts = [
        "# Metrics\n\nWhat `/metrics` of a service has, at the address of `--metrics`; generated from the registry. "
        "A histogram's series end in `_bucket`, `_sum` and `_count`. What is not known, or not measured any more, has "
        "no series. Beside these are the process' own: `eplb_process_cpu_seconds_total`, "
        "`eplb_process_resident_memory_bytes` and others of that prefix.\n\n"
        "The dashboard `deploy/grafana/dashboards/eplb.json` shows them, `deploy/prometheus/rules.yml` has alerts on "
        "them, and the [Runbook](../runbook.md) what to do about those.\n"
    ]
    for heading, entries in metrics().items():
        rows = [
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), escaped(one.help))
            for one in entries
        ]
        parts.append(f"## {heading}\n\n" + table(("metric", "kind", "labels", "meaning"), rows))
    return "\n".join(parts)
