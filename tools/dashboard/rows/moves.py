"""What was decided, what moved, and how long it took."""

from __future__ import annotations

from tools.dashboard.panel import BARS, LEGEND, Panel, Row, per, quantiles

ROW: Row = (
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
            style=BARS,
            decimals=1,
        ),
        Panel(
            "Plans by outcome",
            "Plans that ended in each interval of the graph.",
            [(f"sum by (deployment, outcome) ({per('eplb_plans_total')})", "{{deployment}} {{outcome}}")],
            style=BARS,
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
            [(per("eplb_layers_switched_total"), LEGEND)],
            style=BARS,
            decimals=1,
        ),
        Panel(
            "Experts moved",
            "Slots that received another rank's expert in each interval of the graph.",
            [(per("eplb_moves_total"), LEGEND)],
            style=BARS,
            decimals=1,
        ),
        Panel(
            "Weights moved",
            "Bytes that committed switches moved between ranks, per second.",
            [(per("eplb_moved_bytes_total", "rate"), LEGEND)],
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
)
