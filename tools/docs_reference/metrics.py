"""Reference page for the service's metrics, generated from their declarations."""

from __future__ import annotations

from tools.docs_reference.markdown import escaped, table


def metrics_page() -> str:
    """Return the text of ``reference/metrics.md``."""
    from eplb_service.telemetry.metrics import declared_series

    sections = [
        "# Metrics\n\nThe service exports these metrics under `/metrics` at the address of `--metrics`. This page is "
        "generated from the registry. The series of a histogram end in `_bucket`, `_sum` and `_count`. A value that is "
        "unknown or no longer measured has no series. The process metrics, such as `eplb_process_cpu_seconds_total` "
        "and `eplb_process_resident_memory_bytes`, are exported as well.\n\n"
        "The dashboard `deploy/grafana/dashboards/eplb.json` shows the metrics, `deploy/prometheus/rules.yml` defines "
        "alerts on them, and the [Runbook](../runbook.md) describes the response to each alert.\n"
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
        sections.append(f"## {heading}\n\n" + table(("metric", "kind", "labels", "meaning"), rows))
    return "\n".join(sections)
