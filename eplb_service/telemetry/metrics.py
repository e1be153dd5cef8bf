"""The service's Prometheus series, declared in one table.

The service pushes events and values here. The metrics never query the service.
"""

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
    served, from rank loads that the ranks measured.
  gauge eplb_par_planned{deployment,layer} Peak-to-average ratio that the last committed plan promised for a layer.
  gauge eplb_deployment_par_realised{deployment} Mean of eplb_par_realised over the layers.
  gauge eplb_deployment_par_planned{deployment} Ratio that the last decision promised for the next steps, mean over the
    layers.
  gauge eplb_deployment_par_seen{deployment} Ratio that the last decision observed in its window, mean over the layers.
  gauge eplb_noise_floor{deployment,layer} Ratio that token sampling gives a perfectly balanced layer, computed by the
    last decision.
  gauge eplb_deployment_noise_floor{deployment} Mean of eplb_noise_floor over the layers.
  gauge eplb_hottest_rank{deployment} Rank with the most tokens over all layers, in the newest steps.
  gauge eplb_hottest_layer{deployment} Layer with the highest realised ratio.
  gauge eplb_redundant_bytes_per_rank{deployment} Size of the weights in a rank's redundant slots, over all layers;
    absent if the size of an expert is unknown.
  gauge eplb_rank_load{deployment,rank} Tokens of a rank divided by the mean over all ranks, averaged over the layers,
    in the newest steps.
  gauge eplb_deployment_gain{deployment} Forecast reduction of the peak-to-average ratio compared with the initial
    layout, until the next decision.
  gauge eplb_deployment_gain_low{deployment} Lower end of the 95 % interval of eplb_deployment_gain.
  gauge eplb_deployment_gain_high{deployment} Upper end of the 95 % interval of eplb_deployment_gain.
Gain of balancing:
  gauge eplb_deployment_par_left_alone{deployment} Peak-to-average ratio that the newest steps would have had with the
    initial layout, mean over the layers.
  gauge eplb_deployment_par_gain_ratio{deployment} Fraction by which balancing lowered the peak-to-average ratio of
    the newest steps.
  gauge eplb_gain_verdict_info{deployment,verdict} Constant 1. Verdicts: helps, costs or no gain (time was measured
    across switches), not measurable (step time does not follow balance), or not measured.
  gauge eplb_gain_switches{deployment} Number of switches before and after which step times were measured.
  gauge eplb_gain_seconds{deployment} Time per step that balancing saves, measured across switches; absent if it was not
    measured.
  gauge eplb_gain_low_seconds{deployment} Lower end of the 99 % interval of eplb_gain_seconds.
  gauge eplb_gain_high_seconds{deployment} Upper end of the 99 % interval of eplb_gain_seconds.
  gauge eplb_gain_ranks{deployment} Measured gain as a number of ranks: the ranks that would be needed for the
    work that balancing saves.
  gauge eplb_gain_tokens_per_second{deployment} Measured gain as throughput, in tokens per second.
  gauge eplb_step_seconds{deployment} Wall time of a step as measured by the ranks' hosts, without waits for requests.
  gauge eplb_move_price{deployment} Fraction by which a layer's ratio must fall to justify moving every slot, in the
    last decision.
  gauge eplb_move_cost_seconds{deployment} Time that steps lose for each expert that a rank receives, in the last
    decision; absent if it is assumed.
  gauge eplb_move_cost_seconds_per_byte{deployment} Time that steps lose for each byte of weights that a rank receives;
    absent if the size of an expert is unknown.
  gauge eplb_switch_cost_seconds{deployment} Time that the model waits for the switch of one layer, in the last
    decision.
  gauge eplb_move_price_info{deployment,price} Constant 1. The move price is measured, partly measured, stated or
    assumed.
Decisions and plans:
  counter eplb_decisions{deployment,result} Decisions by result: plan, kept, dropped or failed.
  counter eplb_plans{deployment,outcome} Offered plans by outcome.
  histogram eplb_solve_seconds{deployment} Time to compute one decision.
  histogram eplb_transfer_seconds{deployment} Time that a rank took to stage the experts of one layer.
  histogram eplb_commit_seconds{deployment} Pause of a rank's model during a commit, divided by the number of committed
    layers.
  counter eplb_layers_switched{deployment} Layers whose switch was committed.
  counter eplb_moves{deployment} Experts moved by committed switches.
  counter eplb_moved_bytes{deployment} Bytes of weights moved by committed switches.
  gauge eplb_epoch{deployment} Epoch of the current layout.
  gauge eplb_paused{deployment} 1 while planning is paused.
  gauge eplb_last_decision_age_seconds{deployment} Time since the last decision, or since all ranks were connected.
Agents and heat:
  gauge eplb_agents_connected{deployment} Ranks with a live stream.
  gauge eplb_agents_expected{deployment} Ranks of the group.
  gauge eplb_agents_halted{deployment} Ranks that no longer take part in balancing.
  gauge eplb_agent_silent_seconds{deployment} Longest time since the last message from any connected rank.
  gauge eplb_agent_staging_bytes{deployment} Memory for staged experts of a rank, maximum over the connected ranks;
    absent if no rank reports it.
  gauge eplb_agent_heat_ring_bytes{deployment} Memory for the heat counters of a rank's layers, maximum over the
    connected ranks; absent if no rank reports it.
  counter eplb_steps_received{deployment} Steps for which every rank reported its heat.
  counter eplb_steps_lost{deployment} Steps for which the heat of at least one rank is missing.
  gauge eplb_empty_steps{deployment} Number of consecutive steps, up to the newest, in which no rank counted a token
    although they were not dummy steps.
  gauge eplb_dummy_steps{deployment} Number of consecutive steps, up to the newest, that were dummy steps on all
    ranks.
  gauge eplb_dropped_steps{deployment} Steps that connected agents have dropped since their Hello, over all ranks.
  gauge eplb_heat_one_in{deployment} N if ranks send one in N reports; above 1 if the service cannot process more heat.
  counter eplb_agent_calls{deployment} Calls that hosts made to their agents between forward passes, over
    all ranks.
  counter eplb_agent_call_seconds{deployment} Time that agent calls cost the models, over all ranks.
  counter eplb_agent_vote_seconds{deployment} Part of the agents' call time spent on votes, that is, on waiting for the
    slowest rank, and on commits.
The service:
  gauge eplb_build_info{version} Constant 1, with the running version as a label.
  gauge eplb_leader_term{} Leader term of this service. Ranks follow the service with the highest term.
  gauge eplb_leads{} 1 while this service leads, 0 while another service leads.
  gauge eplb_deployments{} Number of known deployments.
  gauge eplb_problems{deployment} Number of problems; `eplb status` lists them.
  counter eplb_refusals{code} Rejected calls by gRPC status. The log names the callers, at a limited rate.
  counter eplb_log_lines_left_out{} Log lines about callers that were dropped by the rate limit.
  counter eplb_operator_calls{call,result} Operator commands by result: done or failed. The log names the caller.
  gauge eplb_heat_memory_bytes{} Memory limit for the heat of all deployments.
  counter eplb_store_failures{} Failed writes to the store.
  gauge eplb_store_failing{} 1 while the service cannot write to the store, so that a restart would lose data.
  gauge eplb_certificate_expiry_seconds{file} Time until the first certificate of tls_cert or tls_client_ca expires.
  gauge eplb_certificate_expires_soon{file} 1 if a certificate expires within 14 days, or within a quarter of its
    validity if that is shorter.
  histogram eplb_loop_delay_seconds{} Delay of the service's event loop, which affects every stream.
"""
"""Kind, name, labels and help text of each series, by heading. Prometheus adds ``_total`` to counters."""

_BUCKETS = {
    "eplb_solve_seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    "eplb_transfer_seconds": (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0),
    "eplb_commit_seconds": (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0),
    "eplb_loop_delay_seconds": (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
}
Row = tuple[str, str, tuple[str, ...], str]
GaugeValue: TypeAlias = tuple[Any, ...]
"""Name, value and labels of a gauge."""


def declared_series() -> dict[str, list[Row]]:
    """Return the kind, name, labels and help text of every series, by heading of ``TABLE``."""
    sections = re.split(r"^(\w.*):$", TABLE, flags=re.MULTILINE)[1:]
    return {
        heading: [
            (kind, name, tuple(filter(None, labels.split(","))), " ".join(text.split()))
            for kind, name, labels, text in re.findall(
                r"^  (\w+) (\w+)\{(.*?)\} (.*?)$(?!\n    )", rows, flags=re.MULTILINE | re.DOTALL
            )
        ]
        for heading, rows in zip(sections[::2], sections[1::2], strict=True)
    }


class Metrics:
    """All of the service's series, in a registry.

    The number of label values is bounded by the existing deployments and layers. Methods use the names in ``TABLE`` and
    accept labels in the same order, ``deployment`` first.

    Attributes
    ----------
    registry
        Registry with these series and the standard process series.

    Examples
    --------
    >>> metrics = Metrics()
    >>> metrics.count("eplb_plans", "decode", "done")
    >>> metrics.registry.get_sample_value("eplb_plans_total", {"deployment": "decode", "outcome": "done"})
    1.0
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
        self.registry.register(self)  # type: ignore[arg-type, unused-ignore]  # duck-typed collector
        ProcessCollector(namespace="eplb", registry=self.registry)

    def show(self, gauges: Iterable[GaugeValue]) -> None:
        """Replace the values of all gauges. A gauge without a new value is removed."""
        values: dict[str, dict[tuple[str, ...], float]] = {
            name: {} for kind, name, _, _ in self._rows if kind == "gauge"
        }
        for name, value, *labels in gauges:
            values[name][tuple(labels)] = float(value)
        self._values.update(values)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Increase a counter by ``by``."""
        values = self._values[name]
        values[labels] = values.get(labels, 0.0) + by

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram.

        Negative and non-finite durations, which a faulty agent may report, are ignored.
        """
        if math.isfinite(seconds) and seconds >= 0:
            histogram = self._histograms[name]
            (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def expect(self, deployment: str, results: Sequence[str], outcomes: Sequence[str]) -> None:
        """Initialise a deployment's counters to 0, so that the first event is visible as an increase."""
        for kind, name, labels, _ in self._rows:
            if kind == "counter" and labels == ("deployment",):
                self.count(name, deployment, by=0)
        for result in results:
            self.count("eplb_decisions", deployment, result, by=0)
        for outcome in outcomes:
            self.count("eplb_plans", deployment, outcome, by=0)

    def forget(self, deployment: str) -> None:
        """Remove all series of a deployment."""
        for _, name, labels, _ in self._rows:
            if labels[:1] != ("deployment",):
                continue
            if name in self._histograms:
                with contextlib.suppress(KeyError):
                    self._histograms[name].remove(deployment)
            else:
                self._values[name] = {
                    label_values: value
                    for label_values, value in self._values[name].items()
                    if label_values[0] != deployment
                }

    def collect(self) -> Iterator[Metric]:
        """Yield all gauges and counters; called by the registry."""
        for kind, name, labels, text in self._rows:
            if kind == "histogram":
                continue
            family_type = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            family = family_type(name, text, labels=labels)
            for label_values, value in list(self._values[name].items()):
                family.add_metric(label_values, value)
            yield family

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Return the media type and the text of all series.

        The format is the newest one that the HTTP header ``accept`` allows.
        """
        encode, kind = choose_encoder(accept)
        return kind, encode(self.registry)
