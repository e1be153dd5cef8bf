"""What was decided, what moved, and how long it took."""

from __future__ import annotations

from tools.dashboard.panel import BARS, LEGEND, STAIRS, Panel, Row, of, per, quantiles

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
        Panel(
            "Cost of a move",
            "What the last decision took moves to cost: the time that steps lose for each expert that a rank receives, and the wait for each layer's switch. Absent where move_price is a number.",
            [
                (of("eplb_move_cost_seconds"), f"{LEGEND} per expert"),
                (of("eplb_switch_cost_seconds"), f"{LEGEND} per layer switched"),
            ],
            size=(6, 8),
            unit="s",
        ),
        Panel(
            "Cost of a gigabyte moved",
            "The same time that steps lose, for each gigabyte of weights that a rank receives, where an expert's size is known.",
            [(f"1e9 * {of('eplb_move_cost_seconds_per_byte')}", LEGEND)],
            size=(6, 8),
            unit="s",
        ),
        Panel(
            "Price of moves",
            "Part of its ratio that a layer must win to have every slot moved: those costs over the layer's time in the steps that a plan is expected to serve.",
            [(of("eplb_move_price"), LEGEND)],
            size=(6, 8),
            unit="percentunit",
        ),
        Panel(
            "Source of the price of moves",
            "Measured: transfers, slowed steps and commits are the ranks' own. Partly measured: some of them. Stated: a setting is. Assumed: nothing is known.",
            [(of("eplb_move_price_info"), f"{LEGEND} {{{{price}}}}")],
            size=(6, 8),
            style=STAIRS,
            decimals=0,
        ),
    ),
)
