"""Whether all is well: one figure each."""

from __future__ import annotations

from tools.dashboard.panel import GREEN_TO_RED, LEGEND, Panel, Row, joined, of

ABOVE_FLOOR = joined("eplb_deployment_par_realised", "-", "eplb_deployment_noise_floor")

ROW: Row = (
    "Is it well, and is it balanced?",
    (
        Panel(
            "PAR, realised",
            "Peak-to-average ratio: most loaded rank over mean rank, per step, mean over layers, as the ranks measured it.",
            [(of("eplb_deployment_par_realised"), LEGEND)],
            "stat",
            (5, 5),
            decimals=3,
        ),
        Panel(
            "Above the noise floor",
            "Realised ratio less what chance leaves: what could still be won.",
            [(ABOVE_FLOOR, LEGEND)],
            "stat",
            (5, 5),
            decimals=3,
            thresholds=GREEN_TO_RED,
        ),
        Panel(
            "Agents missing",
            "Ranks of the group whose stream is not alive. Inference goes on, balancing waits.",
            [(joined("eplb_agents_expected", "-", "eplb_agents_connected"), LEGEND)],
            "stat",
            (4, 5),
            decimals=0,
            thresholds=((None, "green"), (1, "red")),
        ),
        Panel(
            "Problems",
            "How much is wrong; `eplb status DEPLOYMENT` says what.",
            [(of("eplb_problems"), LEGEND)],
            "stat",
            (4, 5),
            decimals=0,
            thresholds=((None, "green"), (1, "red")),
        ),
        Panel(
            "Last decision",
            "Time since it was made.",
            [(of("eplb_last_decision_age_seconds"), LEGEND)],
            "stat",
            (3, 5),
            unit="s",
            decimals=0,
        ),
        Panel(
            "Planning",
            "Whether decisions are made, or paused by an operator.",
            [(of("eplb_paused"), LEGEND)],
            "stat",
            (3, 5),
            thresholds=((None, "green"), (1, "orange")),
            names={"0": "on", "1": "paused"},
        ),
    ),
)
