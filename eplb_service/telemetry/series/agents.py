"""Series of the ranks' agents: who is there, what their heat lacks, and what their calls take of the models."""

from __future__ import annotations

from eplb_service.telemetry.series.registry import SeriesRegistry


class AgentSeries:
    """Ranks connected and expected, steps received and lost, and time spent in the agents."""

    def __init__(self, registry: SeriesRegistry) -> None:
        self._registry = registry
        gauge, counter = registry.gauge, registry.counter
        self.connected = gauge("eplb_agents_connected", "Ranks whose stream is alive.")
        self.expected = gauge("eplb_agents_expected", "Ranks of the group.")
        self.halted = gauge("eplb_agents_halted", "Ranks that no longer take part in balancing.")
        self.silent_seconds = gauge(
            "eplb_agent_silent_seconds", "Longest time in which nothing was heard of a connected rank."
        )
        self.staging_bytes = gauge(
            "eplb_agent_staging_bytes",
            "Most that a connected rank holds for experts that wait for their commit; absent where none reports it.",
        )
        self.ring_bytes = gauge(
            "eplb_agent_heat_ring_bytes",
            "Most that a connected rank's layers count heat in; absent where none reports it.",
        )
        self.steps_received = counter("eplb_steps_received", "Steps of which every rank's heat arrived.")
        self.steps_lost = counter("eplb_steps_lost", "Steps of which some rank's heat never arrived.")
        self.empty_steps = gauge(
            "eplb_empty_steps",
            "Newest steps in a row in which no rank counted a token, though it was no dummy.",
        )
        self.dummy_steps = gauge("eplb_dummy_steps", "Newest steps in a row that were dummies on all ranks.")
        self.dropped_steps = gauge(
            "eplb_dropped_steps", "Steps that connected agents had to drop since their Hello, over all ranks."
        )
        self.heat_one_in = gauge(
            "eplb_heat_one_in",
            "Of so many reports ranks send one; above 1 where the service cannot take more heat.",
        )
        self.calls = counter(
            "eplb_agent_calls", "Calls of the agents by their hosts between forward passes, over all ranks."
        )
        self.call_seconds = counter(
            "eplb_agent_call_seconds", "Time that these calls took of the models', over all ranks."
        )
        self.vote_seconds = counter(
            "eplb_agent_vote_seconds",
            "Of that, time in votes: waits for the slowest rank, and commits.",
        )

    def expect(self, deployment: str) -> None:
        """Begin the counters of ``deployment`` at 0."""
        for metric in (
            self.steps_received,
            self.steps_lost,
            self.calls,
            self.call_seconds,
            self.vote_seconds,
        ):
            metric.labels(deployment)

    def called(self, deployment: str, calls: int, call_micros: int, vote_micros: int) -> None:
        """A rank's host has called its agent so often since it was last heard, in so many microseconds."""
        self.calls.labels(deployment).inc(calls)
        self.call_seconds.labels(deployment).inc(call_micros / 1e6)
        self.vote_seconds.labels(deployment).inc(vote_micros / 1e6)

    def memory(self, deployment: str, staging_bytes: int | None, ring_bytes: int | None) -> None:
        """Most that a rank holds; what none reports any more is removed."""
        self._registry.set_or_remove(self.staging_bytes, deployment, staging_bytes)
        self._registry.set_or_remove(self.ring_bytes, deployment, ring_bytes)
