"""What the dashboard shows: every panel with its queries, in reading order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CHOSEN = 'deployment=~"$deployment", instance=~"$instance"'
_OF = "{{deployment}} @ {{instance}}"
_KEYS = "job, instance, deployment"
_GREEN_TO_RED = ((None, "green"), (0.05, "yellow"), (0.2, "orange"), (0.5, "red"))
_LINE = {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 0, "showPoints": "never", "spanNulls": False}
_STAIRS = {**_LINE, "lineInterpolation": "stepAfter"}
_BARS = {
    "drawStyle": "bars",
    "lineWidth": 1,
    "fillOpacity": 60,
    "showPoints": "never",
    "stacking": {"mode": "normal"},
}


@dataclass(frozen=True)
class Panel:
    """One panel: its title, a sentence for whoever wonders, and its queries with their legends."""

    title: str
    text: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    size: tuple[int, int] = (8, 8)
    unit: str = "short"
    decimals: int | None = None
    style: dict[str, Any] = field(default_factory=lambda: _LINE)
    least: float | None = None
    thresholds: Sequence[tuple[float | None, str]] = ()
    names: dict[str, str] = field(default_factory=dict)


def of(metric: str, extra: str = "") -> str:
    """The series of one metric that are chosen at the top of the dashboard."""
    return f"{metric}{{{_CHOSEN}{', ' + extra if extra else ''}}}"


def per(metric: str, function: str = "increase") -> str:
    """A counter over each interval of the graph."""
    return f"{function}({of(metric)}[$__rate_interval])"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Median and 99th percentile of a histogram, by deployment and instance."""
    buckets = f"sum by ({_KEYS}, le) ({per(metric + '_bucket', 'rate')})"
    return [
        (f"histogram_quantile({share}, {buckets})", f"{_OF} {name}")
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def joined(left: str, operator: str, right: str, also: str = "") -> str:
    """Two metrics of the same deployment known by the same service."""
    return f"{of(left)} {operator} on ({_KEYS}{also}) {of(right)}"


ABOVE_FLOOR = joined("eplb_deployment_par_realised", "-", "eplb_deployment_noise_floor")

ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Is it well, and is it balanced?",
        (
            Panel(
                "PAR, realised",
                "Peak-to-average ratio: most loaded rank over mean rank, per step, mean over layers, as the ranks measured it.",
                [(of("eplb_deployment_par_realised"), _OF)],
                "stat",
                (5, 5),
                decimals=3,
            ),
            Panel(
                "Above the noise floor",
                "Realised ratio less what chance leaves: what could still be won.",
                [(ABOVE_FLOOR, _OF)],
                "stat",
                (5, 5),
                decimals=3,
                thresholds=_GREEN_TO_RED,
            ),
            Panel(
                "Agents missing",
                "Ranks of the group whose stream is not alive. Inference goes on, balancing waits.",
                [(joined("eplb_agents_expected", "-", "eplb_agents_connected"), _OF)],
                "stat",
                (4, 5),
                decimals=0,
                thresholds=((None, "green"), (1, "red")),
            ),
            Panel(
                "Problems",
                "How much is wrong; `eplb status DEPLOYMENT` says what.",
                [(of("eplb_problems"), _OF)],
                "stat",
                (4, 5),
                decimals=0,
                thresholds=((None, "green"), (1, "red")),
            ),
            Panel(
                "Last decision",
                "Time since it was made.",
                [(of("eplb_last_decision_age_seconds"), _OF)],
                "stat",
                (3, 5),
                unit="s",
                decimals=0,
            ),
            Panel(
                "Planning",
                "Whether decisions are made, or paused by an operator.",
                [(of("eplb_paused"), _OF)],
                "stat",
                (3, 5),
                thresholds=((None, "green"), (1, "orange")),
                names={"0": "on", "1": "paused"},
            ),
        ),
    ),
    (
        "Balance",
        (
            Panel(
                "PAR of the deployment",
                "Realised: measured by the ranks. Seen: what the last decision found in its window. Planned: what it expects from then on. No placement gets below the noise floor for long.",
                [
                    (of("eplb_deployment_par_realised"), f"{_OF} realised"),
                    (of("eplb_deployment_par_seen"), f"{_OF} seen"),
                    (of("eplb_deployment_par_planned"), f"{_OF} planned"),
                    (of("eplb_deployment_noise_floor"), f"{_OF} noise floor"),
                ],
                size=(24, 9),
                decimals=3,
                least=1,
            ),
            Panel(
                "PAR won",
                "Realised PAR of the placement that the deployment started with less that of the one that serves, by the last decision's window, with the bounds of its 95 % interval. Where the interval holds 0, balancing is not shown to help.",
                [
                    (of("eplb_deployment_gain"), f"{_OF} won"),
                    (of("eplb_deployment_gain_low"), f"{_OF} at least"),
                    (of("eplb_deployment_gain_high"), f"{_OF} at most"),
                ],
                size=(24, 7),
                decimals=3,
            ),
            Panel(
                "Time of the experts in a step",
                "The slowest ranks of all layers together, over the last decision's steps: under the layout that was met first (left_alone), as served, and under the best known. At the price of eplb_time_price_info: measured, fitted to step times, stated or assumed.",
                [(of("eplb_experts_seconds"), f"{_OF} {{{{placement}}}}")],
                size=(12, 8),
                unit="s",
            ),
            Panel(
                "Time saved per step",
                "Left alone less as served, with its 95 % interval. Where the interval holds 0, balancing is not shown to help.",
                [
                    (of("eplb_gain_seconds"), f"{_OF} saved"),
                    (of("eplb_gain_low_seconds"), f"{_OF} at least"),
                    (of("eplb_gain_high_seconds"), f"{_OF} at most"),
                ],
                size=(12, 8),
                unit="s",
            ),
            Panel(
                "Wall time of a step",
                "As the ranks' hosts measured it, waits for requests left out; absent where agents do not report it.",
                [(of("eplb_step_seconds"), _OF)],
                size=(8, 8),
                unit="s",
            ),
            Panel(
                "Tokens per second saved",
                "What the time saved amounts to, where hosts report their tokens.",
                [(of("eplb_gain_tokens_per_second"), _OF)],
                size=(8, 8),
            ),
            Panel(
                "Price of time",
                "Where what tokens cost comes from: measured, fitted to this deployment's step times, stated or assumed.",
                [(of("eplb_time_price_info"), f"{_OF} {{{{price}}}}")],
                size=(8, 8),
                style=_STAIRS,
                decimals=0,
            ),
            Panel(
                "Realised PAR above the floor, by layer",
                "One row per layer, colder is better.",
                [
                    (
                        joined("eplb_par_realised", "-", "eplb_noise_floor", ", layer"),
                        f"{_OF} layer {{{{layer}}}}",
                    )
                ],
                "status-history",
                (12, 12),
                decimals=2,
                thresholds=_GREEN_TO_RED,
            ),
            Panel(
                "Load of each rank over the mean",
                "One row per rank, mean over layers: a rank that stays hot is placed badly, or counts others' tokens. Rank by layer is on the service's own page.",
                [(of("eplb_rank_load"), f"{_OF} rank {{{{rank}}}}")],
                "status-history",
                (12, 12),
                decimals=2,
                thresholds=((None, "blue"), (0.95, "green"), (1.05, "yellow"), (1.2, "orange"), (1.5, "red")),
            ),
            Panel(
                "The eight worst layers: realised",
                "Layers with the highest measured ratio at each time.",
                [(f"topk(8, {of('eplb_par_realised')})", f"{_OF} layer {{{{layer}}}}")],
                size=(12, 9),
                decimals=3,
                least=1,
            ),
            Panel(
                "The eight layers with the largest gap: realised less planned",
                "What a plan promised and the next steps did not keep: traffic moved on, or was noisy.",
                [
                    (
                        f"topk(8, {joined('eplb_par_realised', '-', 'eplb_par_planned', ', layer')})",
                        f"{_OF} layer {{{{layer}}}}",
                    )
                ],
                size=(12, 9),
                decimals=3,
            ),
        ),
    ),
    (
        "Decisions and moves",
        (
            Panel(
                "Decisions by what they led to",
                "Decisions in each interval of the graph.",
                [
                    (
                        f"sum by (deployment, result) ({per('eplb_decisions_total')})",
                        "{{deployment}} {{result}}",
                    )
                ],
                style=_BARS,
                decimals=1,
            ),
            Panel(
                "Plans by outcome",
                "Plans that ended in each interval of the graph.",
                [(f"sum by (deployment, outcome) ({per('eplb_plans_total')})", "{{deployment}} {{outcome}}")],
                style=_BARS,
                decimals=1,
            ),
            Panel(
                "Time of a decision",
                "Solving runs beside the streams; agents never wait for it.",
                quantiles("eplb_solve_seconds"),
                unit="s",
            ),
            Panel(
                "Layers switched",
                "Committed layer switches in each interval of the graph.",
                [(per("eplb_layers_switched_total"), _OF)],
                style=_BARS,
                decimals=1,
            ),
            Panel(
                "Experts moved",
                "Slots that received another rank's expert in each interval of the graph.",
                [(per("eplb_moves_total"), _OF)],
                style=_BARS,
                decimals=1,
            ),
            Panel(
                "Weights moved",
                "Bytes that committed switches moved between ranks, per second.",
                [(per("eplb_moved_bytes_total", "rate"), _OF)],
                unit="Bps",
            ),
            Panel(
                "Time of a transfer",
                "Staging the experts of one layer on one rank, beside the model.",
                quantiles("eplb_transfer_seconds"),
                size=(12, 8),
                unit="s",
            ),
            Panel(
                "Time of a commit",
                "What one step waits for, between two forward passes, when one layer switches.",
                quantiles("eplb_commit_seconds"),
                size=(12, 8),
                unit="s",
            ),
        ),
    ),
    (
        "Agents and heat",
        (
            Panel(
                "Steps per second",
                "Received: every rank's heat arrived. Lost: some rank's never did.",
                [
                    (per("eplb_steps_received_total", "rate"), f"{_OF} received"),
                    (per("eplb_steps_lost_total", "rate"), f"{_OF} lost"),
                ],
                size=(12, 8),
            ),
            Panel(
                "Agents",
                "Ranks whose stream is alive, ranks of the group, and ranks that no longer take part.",
                [
                    (of("eplb_agents_connected"), f"{_OF} connected"),
                    (of("eplb_agents_expected"), f"{_OF} expected"),
                    (of("eplb_agents_halted"), f"{_OF} halted"),
                ],
                size=(12, 8),
                style=_STAIRS,
                decimals=0,
                least=0,
            ),
            Panel(
                "Longest silence of a rank",
                "Since the service last heard a connected rank; heartbeats come every `heartbeat_seconds`.",
                [(of("eplb_agent_silent_seconds"), _OF)],
                unit="s",
            ),
            Panel(
                "Steps without tokens, steps dropped",
                "Newest steps in a row that were empty or dummies on all ranks, steps that agents dropped because the service was slow, and of how many reports they send one since.",
                [
                    (of("eplb_empty_steps"), f"{_OF} empty"),
                    (of("eplb_dummy_steps"), f"{_OF} dummy"),
                    (of("eplb_dropped_steps"), f"{_OF} dropped"),
                    (of("eplb_heat_one_in"), f"{_OF} reports, of which one is sent"),
                ],
                style=_STAIRS,
                decimals=0,
            ),
            Panel(
                "Epoch, leader term and who leads",
                "The epoch grows with every layer that switches, the term with every service that leads. Of services with one lease, one leads.",
                [
                    (of("eplb_epoch"), f"{_OF} epoch"),
                    ('eplb_leader_term{instance=~"$instance"}', "{{instance}} leader term"),
                    ('eplb_leads{instance=~"$instance"}', "{{instance}} leads"),
                ],
                style=_STAIRS,
                decimals=0,
            ),
        ),
    ),
    (
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
                style=_STAIRS,
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
                style=_STAIRS,
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
                style=_STAIRS,
                decimals=0,
            ),
        ),
    ),
)
