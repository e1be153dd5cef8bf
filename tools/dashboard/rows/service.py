"""What the service itself takes, and what it refused."""

from __future__ import annotations

from tools.dashboard.panel import STAIRS, Panel, Row

ROW: Row = (
    "Health of the service",
    (
        Panel(
            "CPU",
            "Cores in use: the planner's threads and the event loop.",
            [
                (
                    'rate(eplb_process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])',
                    "{{instance}}",
                )
            ],
            least=0,
        ),
        Panel(
            "Memory",
            "Resident memory, and of it what the heat of all deployments may take by their shapes (max_heat_bytes), and "
            "large requests that are under way (max_in_flight_bytes).",
            [
                ('eplb_process_resident_memory_bytes{instance=~"$instance"}', "{{instance}} resident"),
                ('eplb_heat_memory_bytes{instance=~"$instance"}', "{{instance}} heat, at most"),
                ('eplb_in_flight_bytes{instance=~"$instance"}', "{{instance}} requests under way"),
            ],
            unit="bytes",
            least=0,
        ),
        Panel(
            "Delay of the event loop",
            "How late the loop is: what every stream waits for, 99th percentile.",
            [
                (
                    'histogram_quantile(0.99, sum by (job, instance, le) (rate(eplb_loop_delay_seconds_bucket{instance=~"$instance"}[$__rate_interval])))',
                    "{{instance}}",
                )
            ],
            unit="s",
            least=0,
        ),
        Panel(
            "Calls refused",
            "By gRPC status; the service's log has the reasons, but for lines beyond the rate that is written.",
            [
                (
                    'sum by (instance, code) (increase(eplb_refusals_total{instance=~"$instance"}[$__rate_interval]))',
                    "{{instance}} {{code}}",
                ),
                (
                    'increase(eplb_log_lines_left_out_total{instance=~"$instance"}[$__rate_interval])',
                    "{{instance}} not in the log",
                ),
            ],
            style=STAIRS,
            decimals=0,
        ),
        Panel(
            "Orders of operators",
            "The service's log names the callers.",
            [
                (
                    'sum by (instance, call, result) (increase(eplb_operator_calls_total{instance=~"$instance"}[$__rate_interval]))',
                    "{{call}} {{result}} @ {{instance}}",
                )
            ],
            style=STAIRS,
            decimals=0,
        ),
        Panel(
            "Writes to the store that failed",
            "A full or broken disk: placements and plans since then are not remembered.",
            [
                (
                    'increase(eplb_store_failures_total{instance=~"$instance"}[$__rate_interval])',
                    "{{instance}} failed",
                )
            ],
            style=STAIRS,
            decimals=0,
        ),
    ),
)
