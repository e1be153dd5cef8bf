"""Series of the service itself: who it is, what strangers and operators do to it, memory and delays."""

from __future__ import annotations

from eplb_service.telemetry.series.registry import SeriesRegistry

_DELAY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class ServiceSeries:
    """Of no deployment, but for the number of its problems."""

    def __init__(self, registry: SeriesRegistry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self.build = gauge("eplb_build_info", "Constant 1; the running version.", ("version",))
        self.leader_term = gauge("eplb_leader_term", "Of this service; of two, ranks follow the higher.", ())
        self.leads = gauge(
            "eplb_leads", "1 while this service is the one that leads, 0 while it waits for another.", ()
        )
        self.deployments = gauge("eplb_deployments", "Deployments known.", ())
        self.problems = gauge("eplb_problems", "What is wrong, in number; `eplb status` says what.")
        self.refusals = counter(
            "eplb_refusals",
            "Calls turned away, by gRPC status; the log says whose, at a bounded rate.",
            ("code",),
        )
        self.log_lines_left_out = counter(
            "eplb_log_lines_left_out", "Log lines that strangers caused beyond the rate that is written.", ()
        )
        self.operator_calls = counter(
            "eplb_operator_calls",
            "Orders of operators: done or failed. The log names the caller.",
            ("call", "result"),
        )
        self.heat_bytes = gauge("eplb_heat_memory_bytes", "Memory that the deployments' heat may take.", ())
        self.in_flight_bytes = gauge(
            "eplb_in_flight_bytes", "Memory given to large requests of agents that are under way.", ()
        )
        self.store_failures = counter("eplb_store_failures", "Writes to the store that failed.", ())
        self.loop_delay = registry.histogram(
            "eplb_loop_delay_seconds",
            "How late the service's event loop was: what every stream waits for.",
            _DELAY_BUCKETS,
            (),
        )
        self.process = registry.process()
