"""Prometheus series of the service, declared in one table; they are given what happens and never ask."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

TABLE = """
Balance:
  gauge eplb_par_realised{deployment,layer} Peak-to-average ratio of a layer over the newest 64 steps as they were
    served, from loads that the ranks measured.
  gauge eplb_par_planned{deployment,layer} Peak-to-average ratio that the last plan switched in promised for a layer.
  gauge eplb_deployment_par_realised{deployment} Mean of eplb_par_realised over layers.
  gauge eplb_deployment_par_planned{deployment} Mean over layers that the last decision expects to serve from then on.
  gauge eplb_deployment_par_seen{deployment} Mean over layers that the last decision found in its window.
  gauge eplb_noise_floor{deployment,layer} Ratio that chance alone leaves a balanced layer, by the last decision.
  gauge eplb_deployment_noise_floor{deployment} Mean of eplb_noise_floor over layers.
  gauge eplb_hottest_rank{deployment} Rank with most tokens over all layers, in the newest steps.
  gauge eplb_hottest_layer{deployment} Layer with the highest realised ratio.
  gauge eplb_redundant_bytes_per_rank{deployment} Weights that a rank holds in slots beyond one per expert, over
    all layers; absent if an expert's size is not known.
  gauge eplb_rank_load{deployment,rank} Tokens of a rank over the mean rank, mean over layers, in the newest steps.
  gauge eplb_deployment_gain{deployment} Peak-to-average ratio forecast to be won over the ranks' first
    placement until the next decision.
  gauge eplb_deployment_gain_low{deployment} Low end of the 95 % interval of the gain until the next decision.
  gauge eplb_deployment_gain_high{deployment} High end of the 95 % interval of the gain until the next decision.
Gain of balancing:
  gauge eplb_deployment_par_left_alone{deployment} Peak-to-average ratio that the newest steps would have had under the
    layout that the ranks came with, mean over layers.
  gauge eplb_deployment_par_gain_ratio{deployment} Part by which balancing lowered the ratio of these steps.
  gauge eplb_gain_verdict_info{deployment,verdict} Constant 1; helps or costs if time was measured across switches; no
    gain, not measurable if step time does not follow balance, or not measured.
  gauge eplb_gain_switches{deployment} Switches with measured step times before and after them.
  gauge eplb_gain_seconds{deployment} Time per step that balancing saves, measured across switches; absent otherwise.
  gauge eplb_gain_low_seconds{deployment} Low end of the 99 % interval of eplb_gain_seconds.
  gauge eplb_gain_high_seconds{deployment} High end of the 99 % interval of eplb_gain_seconds.
  gauge eplb_gain_ranks{deployment} Ranks whose work the measured gain is worth.
  gauge eplb_gain_tokens_per_second{deployment} Tokens per second that the measured gain amounts to.
  gauge eplb_step_seconds{deployment} Wall time of a step as the ranks' hosts measured it, waits left out.
  gauge eplb_move_price{deployment} Part of its ratio that a layer must win to have every slot moved, in the last
    decision.
  gauge eplb_move_cost_seconds{deployment} Time that steps lose for each expert that a rank receives, in the last
    decision; absent if it is assumed.
  gauge eplb_move_cost_seconds_per_byte{deployment} The same for each byte of weights, where their size is known.
  gauge eplb_switch_cost_seconds{deployment} Time for which the model waits for a layer's switch, in the last decision.
  gauge eplb_move_price_info{deployment,price} Constant 1; the price of moves is measured, partly measured, stated or
    assumed.
Decisions and plans:
  counter eplb_decisions{deployment,result} Decisions by what they led to: plan, kept, dropped or failed.
  counter eplb_plans{deployment,outcome} Plans offered, by outcome.
  histogram eplb_solve_seconds{deployment} Time that one decision took to compute.
  histogram eplb_transfer_seconds{deployment} Time in which a rank staged the experts of one layer.
  histogram eplb_commit_seconds{deployment} A layer's share of the time for which a commit paused a rank's model.
  counter eplb_layers_switched{deployment} Layers whose switch was committed.
  counter eplb_moves{deployment} Experts moved by committed switches.
  counter eplb_moved_bytes{deployment} Weights moved by committed switches.
  gauge eplb_epoch{deployment} Version of the placement in force.
  gauge eplb_paused{deployment} 1 while planning is paused.
  gauge eplb_last_decision_age_seconds{deployment} Time since the last decision, or since the ranks came together.
Agents and heat:
  gauge eplb_agents_connected{deployment} Ranks whose stream is alive.
  gauge eplb_agents_expected{deployment} Ranks of the group.
  gauge eplb_agents_halted{deployment} Ranks that no longer take part in balancing.
  gauge eplb_agent_silent_seconds{deployment} Longest time in which nothing was heard of a connected rank.
  gauge eplb_agent_staging_bytes{deployment} Most that a connected rank holds for experts that wait for their commit;
    absent where none reports it.
  gauge eplb_agent_heat_ring_bytes{deployment} Most that a connected rank's layers count heat in; absent where none
    reports it.
  counter eplb_steps_received{deployment} Steps of which every rank's heat arrived.
  counter eplb_steps_lost{deployment} Steps of which some rank's heat never arrived.
  gauge eplb_empty_steps{deployment} Newest steps in a row in which no rank counted a token, though it was no dummy.
  gauge eplb_dummy_steps{deployment} Newest steps in a row that were dummies on all ranks.
  gauge eplb_dropped_steps{deployment} Steps that connected agents had to drop since their Hello, over all ranks.
  gauge eplb_heat_one_in{deployment} Ranks send one of so many reports; above 1 where the service cannot take more heat.
  counter eplb_agent_calls{deployment} Calls of the agents by their hosts between forward passes, over all ranks.
  counter eplb_agent_call_seconds{deployment} Time that these calls took of the models', over all ranks.
  counter eplb_agent_vote_seconds{deployment} Of that, time in votes: waits for the slowest rank, and commits.
The service:
  gauge eplb_build_info{version} Constant 1; the running version.
  gauge eplb_leader_term{} Of this service; of two, ranks follow the higher.
  gauge eplb_leads{} 1 while this service is the one that leads, 0 while it waits for another.
  gauge eplb_deployments{} Deployments known.
  gauge eplb_problems{deployment} Number of problems; `eplb status` lists them.
  counter eplb_refusals{code} Calls turned away, by gRPC status; the log names the callers, at a bounded rate.
  counter eplb_log_lines_left_out{} Log lines about callers that were left out, beyond the rate that is written.
  counter eplb_operator_calls{call,result} Orders of operators: done or failed. The log names the caller.
  gauge eplb_heat_memory_bytes{} Memory that the deployments' heat may take.
  counter eplb_store_failures{} Writes to the store that failed.
  gauge eplb_store_failing{} 1 while the store cannot be written, so that a restart would forget something.
  gauge eplb_certificate_expiry_seconds{file} Time until the first certificate of tls_cert or tls_client_ca expires.
  gauge eplb_certificate_expires_soon{file} 1 within 14 days of that, or a quarter of its validity where that is less.
  histogram eplb_loop_delay_seconds{} Delay of the service's event loop, which every stream waits for.
"""
"""Kind, name, labels and help of each series by heading; Prometheus adds ``_total`` to counters."""

_BUCKETS = {
    "eplb_solve_seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    "eplb_transfer_seconds": (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0),
    "eplb_commit_seconds": (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0),
    "eplb_loop_delay_seconds": (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
}
Row = tuple[str, str, tuple[str, ...], str]
Shown: TypeAlias = tuple[Any, ...]
"""Name of a gauge, its value and its labels."""


def declared_series() -> dict[str, list[Row]]:
    """Return kind, name, labels and help of every series by its heading in ``TABLE``."""
    parts = re.split(r"^(\w.*):$", TABLE, flags=re.MULTILINE)[1:]
    return {
        heading: [
            (kind, name, tuple(filter(None, labels.split(","))), " ".join(text.split()))
            for kind, name, labels, text in re.findall(
                r"^  (\w+) (\w+)\{(.*?)\} (.*?)$(?!\n    )", rows, flags=re.MULTILINE | re.DOTALL
            )
        ]
        for heading, rows in zip(parts[::2], parts[1::2], strict=True)
    }


class Metrics:
    """All series, in a registry of their own; every label is bounded by the deployments and layers that exist.

    Series are named as in ``TABLE``, and their labels given in its order; ``deployment`` is the first.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = [row for rows in declared_series().values() for row in rows]
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, Histogram] = {}
        for kind, name, labels, text in self._rows:
            if kind == "histogram":
                buckets = _BUCKETS[name]
                self._histograms[name] = Histogram(
                    name, text, labels, buckets=buckets, registry=self.registry
                )
            else:
                self._values[name] = {(): 0.0} if kind == "counter" and not labels else {}
        self.registry.register(self)  # type: ignore[arg-type, unused-ignore]  # it is no subclass
        ProcessCollector(namespace="eplb", registry=self.registry)

    def show(self, gauges: Iterable[Shown]) -> None:
        """Have all gauges be these from now on, and no other."""
        shown: dict[str, dict[tuple[str, ...], float]] = {
            name: {} for kind, name, _, _ in self._rows if kind == "gauge"
        }
        for name, value, *labels in gauges:
            shown[name][tuple(labels)] = float(value)
        self._values.update(shown)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Increase a counter."""
        values = self._values[name]
        values[labels] = values.get(labels, 0.0) + by

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add to a histogram; reported durations that cannot be are left out."""
        if math.isfinite(seconds) and seconds >= 0:
            histogram = self._histograms[name]
            (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def expect(self, deployment: str, results: Sequence[str], outcomes: Sequence[str]) -> None:
        """Begin the counters of a deployment at 0, so that the first failure is an increase like any other."""
        for kind, name, labels, _ in self._rows:
            if kind == "counter" and labels == ("deployment",):
                self.count(name, deployment, by=0)
        for result in results:
            self.count("eplb_decisions", deployment, result, by=0)
        for outcome in outcomes:
            self.count("eplb_plans", deployment, outcome, by=0)

    def forget(self, deployment: str) -> None:
        """Remove every series of a deployment that is known no more."""
        for _, name, labels, _ in self._rows:
            if labels[:1] != ("deployment",):
                continue
            if name in self._histograms:
                with contextlib.suppress(KeyError):
                    self._histograms[name].remove(deployment)
            else:
                kept = {of: value for of, value in self._values[name].items() if of[0] != deployment}
                self._values[name] = kept

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, as the registry asks for them."""
        for kind, name, labels, text in self._rows:
            if kind == "histogram":
                continue
            family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(
                name, text, labels=labels
            )
            for of, value in list(self._values[name].items()):
                family.add_metric(of, value)
            yield family

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Media type and text of all series, in the newest format that ``accept``, a header of HTTP, names."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self.registry)
