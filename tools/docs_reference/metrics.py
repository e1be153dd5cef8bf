"""The reference of the service's metrics, from the table that declares them."""

from __future__ import annotations

from tools.docs_reference.markdown import escaped, table


def metrics_page() -> str:
    """``reference/metrics.md``."""
    from eplb_service.telemetry.metrics import declared_series

    parts = [
        "# Metrics\n\nWhat `/metrics` of a service has, at the address of `--metrics`; generated from the registry. "
        "A histogram's series end in `_bucket`, `_sum` and `_count`. What is not known, or not measured any more, has "
        "no series. Beside these are the process' own: `eplb_process_cpu_seconds_total`, "
        "`eplb_process_resident_memory_bytes` and others of that prefix.\n\n"
        "The dashboard `deploy/grafana/dashboards/eplb.json` shows them, `deploy/prometheus/rules.yml` has alerts on "
        "them, and the [Runbook](../runbook.md) what to do about those.\n"
    ]
    for heading, series in declared_series().items():
        rows = [
            (
                f"`{name}{'_total' if kind == 'counter' else ''}`",
                kind,
                ", ".join(f"`{label}`" for label in labels),
                escaped(text),
            )
            for kind, name, labels, text in series
        ]
        parts.append(f"## {heading}\n\n" + table(("metric", "kind", "labels", "meaning"), rows))
    return "\n".join(parts)
