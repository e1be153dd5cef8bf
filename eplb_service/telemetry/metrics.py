"""Prometheus metrics of the service; they are given what happens and never ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from eplb_service.wire.move_price import PricedMoves
from eplb_service.wire.worth import Worth

Metric: TypeAlias = Gauge | Counter | Histogram

_DEPLOYMENT = ("deployment",)
_LAYER = ("deployment", "layer")
_TRANSFER_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_COMMIT_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_DELAY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_SOLVE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics, in a registry of their own; every label is bounded by the deployments and layers that exist."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._labelled: list[tuple[Metric, Sequence[str]]] = []

        def gauge(name: str, text: str, labels: Sequence[str] = _DEPLOYMENT) -> Gauge:
            made = Gauge(name, text, labels, registry=self.registry)
            self._labelled.append((made, labels))
            return made

        def counter(name: str, text: str, labels: Sequence[str] = _DEPLOYMENT) -> Counter:
            made = Counter(name, text, labels, registry=self.registry)
            self._labelled.append((made, labels))
            return made

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, text, _DEPLOYMENT, buckets=buckets, registry=self.registry)
            self._labelled.append((made, _DEPLOYMENT))
            return made

        self.build = gauge("eplb_build_info", "Constant 1; the running version.", ("version",))
        self.leader_term = gauge("eplb_leader_term", "Of this service; of two, ranks follow the higher.", ())
        self.leads = gauge(
            "eplb_leads", "1 while this service is the one that leads, 0 while it waits for another.", ()
        )
        self.deployments = gauge("eplb_deployments", "Deployments known.", ())
        self.par_realised = gauge(
            "eplb_par_realised",
            "Peak-to-average ratio of a layer, from loads that the ranks measured.",
            _LAYER,
        )
        self.par_planned = gauge(
            "eplb_par_planned",
            "Peak-to-average ratio that the last plan switched in promised for a layer.",
            _LAYER,
        )
        self.deployment_par_realised = gauge(
            "eplb_deployment_par_realised", "Mean of eplb_par_realised over layers."
        )
        self.deployment_par_planned = gauge(
            "eplb_deployment_par_planned",
            "Mean over layers that the last decision expects to serve from then on.",
        )
        self.deployment_par_seen = gauge(
            "eplb_deployment_par_seen", "Mean over layers that the last decision found in its window."
        )
        self.noise_floor = gauge(
            "eplb_noise_floor",
            "Ratio that chance alone leaves a balanced layer, as the last decision took it to be.",
            _LAYER,
        )
        self.deployment_noise_floor = gauge(
            "eplb_deployment_noise_floor", "Mean of eplb_noise_floor over layers."
        )
        self.rank_load = gauge(
            "eplb_rank_load",
            "Tokens of a rank over the mean rank, mean over layers, in the newest steps.",
            ("deployment", "rank"),
        )
        won = "Peak-to-average ratio won over what the ranks served when they first came together, in the last window"
        self.deployment_gain = gauge("eplb_deployment_gain", f"{won}.")
        self.deployment_gain_low = gauge("eplb_deployment_gain_low", f"{won}: low end of its 95 % interval.")
        self.deployment_gain_high = gauge(
            "eplb_deployment_gain_high", f"{won}: high end of its 95 % interval."
        )
        self.experts_seconds = gauge(
            "eplb_experts_seconds",
            "Time of the slowest ranks of all layers in a step: left_alone as met first, serving, best_known.",
            ("deployment", "placement"),
        )
        saved = "Time per step that balancing saves over what the ranks served when they first came together"
        self.gain_seconds = gauge("eplb_gain_seconds", f"{saved}, at the price of eplb_time_price_info.")
        self.gain_low_seconds = gauge("eplb_gain_low_seconds", f"{saved}: low end of its 95 % interval.")
        self.gain_high_seconds = gauge("eplb_gain_high_seconds", f"{saved}: high end of its 95 % interval.")
        self.time_price = gauge(
            "eplb_time_price_info",
            "Constant 1; what tokens cost in time is measured, fitted to step times, stated or assumed.",
            ("deployment", "price"),
        )
        self.step_seconds = gauge(
            "eplb_step_seconds", "Wall time of a step as the ranks' hosts measured it, waits left out."
        )
        self.tokens_won = gauge(
            "eplb_gain_tokens_per_second", "Tokens per second that the time saved amounts to."
        )
        priced = "as the last decision priced its moves"
        self.move_price_ratio = gauge(
            "eplb_move_price", f"Part of its ratio that a layer must win to have every slot moved, {priced}."
        )
        self.move_cost = gauge(
            "eplb_move_cost_seconds",
            f"Time that steps lose for each expert that a rank receives, {priced}.",
        )
        self.byte_cost = gauge(
            "eplb_move_cost_seconds_per_byte", "The same for each byte of weights, where their size is known."
        )
        self.switch_cost = gauge(
            "eplb_switch_cost_seconds", f"Time for which the model waits for a layer's switch, {priced}."
        )
        self.move_price_source = gauge(
            "eplb_move_price_info",
            "Constant 1; the price of moves is measured, partly measured, stated or assumed.",
            ("deployment", "price"),
        )
        self.solve_seconds = histogram(
            "eplb_solve_seconds", "Time that one decision took to compute.", _SOLVE_BUCKETS
        )
        self.transfer_seconds = histogram(
            "eplb_transfer_seconds",
            "Time in which a rank staged the experts of one layer.",
            _TRANSFER_BUCKETS,
        )
        self.commit_seconds = histogram(
            "eplb_commit_seconds",
            "Time for which a rank's step waited for one layer's commit.",
            _COMMIT_BUCKETS,
        )
        self.steps_received = counter("eplb_steps_received", "Steps of which every rank's heat arrived.")
        self.steps_lost = counter("eplb_steps_lost", "Steps of which some rank's heat never arrived.")
        self.layers_switched = counter("eplb_layers_switched", "Layers whose switch was committed.")
        self.moves = counter("eplb_moves", "Experts moved by committed switches.")
        self.moved_bytes = counter("eplb_moved_bytes", "Weights moved by committed switches.")
        self.decisions = counter(
            "eplb_decisions",
            "Decisions by what they led to: plan, kept, dropped or failed.",
            ("deployment", "result"),
        )
        self.plans = counter("eplb_plans", "Plans offered, by outcome.", ("deployment", "outcome"))
        self.agents_connected = gauge("eplb_agents_connected", "Ranks whose stream is alive.")
        self.agents_expected = gauge("eplb_agents_expected", "Ranks of the group.")
        self.epoch = gauge("eplb_epoch", "Version of the placement in force.")
        self.paused = gauge("eplb_paused", "1 while planning is paused.")
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
        self.last_decision_age = gauge(
            "eplb_last_decision_age_seconds",
            "Time since the last decision, or since the ranks came together.",
        )
        self.agents_halted = gauge("eplb_agents_halted", "Ranks that no longer take part in balancing.")
        self.store_failures = counter("eplb_store_failures", "Writes to the store that failed.", ())
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
        self.agent_calls = counter(
            "eplb_agent_calls", "Calls of the agents by their hosts between forward passes, over all ranks."
        )
        self.agent_call_seconds = counter(
            "eplb_agent_call_seconds", "Time that these calls took of the models', over all ranks."
        )
        self.agent_vote_seconds = counter(
            "eplb_agent_vote_seconds",
            "Of that, time in votes: waits for the slowest rank, and commits.",
        )
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
        self.loop_delay = Histogram(
            "eplb_loop_delay_seconds",
            "How late the service's event loop was: what every stream waits for.",
            buckets=_DELAY_BUCKETS,
            registry=self.registry,
        )
        self.process = ProcessCollector(namespace="eplb", registry=self.registry)
        self.problems = gauge("eplb_problems", "What is wrong, in number; `eplb status` says what.")

    def expect(self, deployment: str, results: Sequence[str], outcomes: Sequence[str]) -> None:
        """Begin the counters of a deployment at 0, so that the first failure is an increase like any other."""
        for result in results:
            self.decisions.labels(deployment, result)
        for outcome in outcomes:
            self.plans.labels(deployment, outcome)
        for metric in (
            self.steps_received,
            self.steps_lost,
            self.layers_switched,
            self.moves,
            self.moved_bytes,
            self.agent_calls,
            self.agent_call_seconds,
            self.agent_vote_seconds,
        ):
            metric.labels(deployment)

    def transferred(self, deployment: str, seconds: float) -> None:
        """A rank has staged a layer, in what it says were ``seconds``."""
        if math.isfinite(seconds) and seconds >= 0:
            self.transfer_seconds.labels(deployment).observe(seconds)

    def committed(self, deployment: str, seconds: float) -> None:
        """A rank has switched a layer, in what it says were ``seconds``."""
        if math.isfinite(seconds) and seconds >= 0:
            self.commit_seconds.labels(deployment).observe(seconds)

    def called(self, deployment: str, calls: int, call_micros: int, vote_micros: int) -> None:
        """A rank's host has called its agent so often since it was last heard, in so many microseconds."""
        self.agent_calls.labels(deployment).inc(calls)
        self.agent_call_seconds.labels(deployment).inc(call_micros / 1e6)
        self.agent_vote_seconds.labels(deployment).inc(vote_micros / 1e6)

    def agent_memory(self, deployment: str, staging_bytes: int | None, ring_bytes: int | None) -> None:
        """Most that a rank holds; what none reports any more is removed."""
        _set_or_remove(self.staging_bytes, deployment, staging_bytes)
        _set_or_remove(self.ring_bytes, deployment, ring_bytes)

    def gain(self, deployment: str, mean: float, low: float, high: float) -> None:
        """What balancing has won, and the interval that it lies in."""
        self.deployment_gain.labels(deployment).set(mean)
        self.deployment_gain_low.labels(deployment).set(low)
        self.deployment_gain_high.labels(deployment).set(high)

    def worth(self, deployment: str, worth: Worth) -> None:
        """What balancing is worth; what is not known any more is removed."""
        for placement, milliseconds in (
            ("left_alone", worth.left_alone_ms),
            ("serving", worth.serving_ms),
            ("best_known", worth.best_ms),
        ):
            self.experts_seconds.labels(deployment, placement).set(milliseconds / 1e3)
        self.gain_seconds.labels(deployment).set(worth.gain_ms / 1e3)
        self.gain_low_seconds.labels(deployment).set(worth.gain_low_ms / 1e3)
        self.gain_high_seconds.labels(deployment).set(worth.gain_high_ms / 1e3)
        _remove(self.time_price, ("deployment", "price"), deployment)
        self.time_price.labels(deployment, worth.price_kind).set(1)
        _set_or_remove(self.step_seconds, deployment, worth.step_ms, 1e-3)
        _set_or_remove(self.tokens_won, deployment, worth.tokens_per_second_won)

    def move_price(self, deployment: str, priced: PricedMoves) -> None:
        """What moves were priced at; what is not known any more is removed."""
        self.move_price_ratio.labels(deployment).set(priced.price)
        _remove(self.move_price_source, ("deployment", "price"), deployment)
        self.move_price_source.labels(deployment, priced.kind).set(1)
        _set_or_remove(self.move_cost, deployment, priced.ms_per_move, 1e-3)
        _set_or_remove(self.byte_cost, deployment, priced.ms_per_megabyte, 1e-9)
        _set_or_remove(self.switch_cost, deployment, priced.ms_per_switch, 1e-3)

    def layer_pars(self, deployment: str, realised: Sequence[float], planned: dict[int, float]) -> None:
        """Per-layer ratios; zeros were not measured and are left out."""
        for layer, value in enumerate(realised):
            if value > 0:
                self.par_realised.labels(deployment, str(layer)).set(value)
        for layer, value in planned.items():
            self.par_planned.labels(deployment, str(layer)).set(value)

    def forget(self, deployment: str) -> None:
        """Remove every series of a deployment that is known no more."""
        for metric, names in self._labelled:
            _remove(metric, names, deployment)

    def forget_layers(self, deployment: str) -> None:
        """Remove what was reported of a deployment's layers and ranks; another group may have others."""
        for metric in (self.par_realised, self.par_planned, self.noise_floor):
            _remove(metric, _LAYER, deployment)
        _remove(self.rank_load, ("deployment", "rank"), deployment)
        self._forget_worth(deployment)

    def forget_balance(self, deployment: str) -> None:
        """Remove what is measured while ranks serve; none is connected."""
        self.forget_layers(deployment)
        for metric in (
            self.deployment_par_realised,
            self.silent_seconds,
            self.staging_bytes,
            self.ring_bytes,
        ):
            _remove(metric, _DEPLOYMENT, deployment)

    def _forget_worth(self, deployment: str) -> None:
        _remove(self.experts_seconds, ("deployment", "placement"), deployment)
        for source in (self.time_price, self.move_price_source):
            _remove(source, ("deployment", "price"), deployment)
        for metric in (self.gain_seconds, self.gain_low_seconds, self.gain_high_seconds):
            _remove(metric, _DEPLOYMENT, deployment)
        for metric in (self.step_seconds, self.tokens_won, self.move_price_ratio):
            _remove(metric, _DEPLOYMENT, deployment)
        for metric in (self.move_cost, self.byte_cost, self.switch_cost):
            _remove(metric, _DEPLOYMENT, deployment)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """All metrics in the newest format that ``accept``, a header of HTTP, names; its media type, and the text."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self.registry)


def _set_or_remove(gauge: Gauge, deployment: str, value: float | None, scale: float = 1.0) -> None:
    if value is None:
        _remove(gauge, _DEPLOYMENT, deployment)
    else:
        gauge.labels(deployment).set(value * scale)


def _remove(metric: Metric, names: Sequence[str], deployment: str) -> None:
    samples = [sample.labels for family in metric.collect() for sample in family.samples]
    for labels in {tuple(of[name] for name in names) for of in samples if of.get("deployment") == deployment}:
        metric.remove(*labels)
