"""Balance over time, by layer and by rank, and what it wins."""

from __future__ import annotations

from tools.dashboard.panel import GREEN_TO_RED, LEGEND, STAIRS, Panel, Row, joined, of

ROW: Row = (
    "Balance",
    (
        Panel(
            "PAR of the deployment",
            "Realised: measured by the ranks. Seen: what the last decision found in its window. Planned: what it expects from then on. No placement gets below the noise floor for long.",
            [
                (of("eplb_deployment_par_realised"), f"{LEGEND} realised"),
                (of("eplb_deployment_par_seen"), f"{LEGEND} seen"),
                (of("eplb_deployment_par_planned"), f"{LEGEND} planned"),
                (of("eplb_deployment_noise_floor"), f"{LEGEND} noise floor"),
            ],
            size=(24, 9),
            decimals=3,
            least=1,
        ),
        Panel(
            "Balancedness",
            "One over the realised PAR: the same in the figure that vLLM and SGLang name, mean rank over hottest rank. Theirs is averaged over layers in other ways, so the last digits differ.",
            [(f"1 / {of('eplb_deployment_par_realised')}", LEGEND)],
            size=(24, 6),
            unit="percentunit",
        ),
        Panel(
            "PAR won",
            "Realised PAR of the placement that the deployment started with less that of the one that serves, by the last decision's window, with the bounds of its 95 % interval. Where the interval holds 0, balancing is not shown to help.",
            [
                (of("eplb_deployment_gain"), f"{LEGEND} won"),
                (of("eplb_deployment_gain_low"), f"{LEGEND} at least"),
                (of("eplb_deployment_gain_high"), f"{LEGEND} at most"),
            ],
            size=(24, 7),
            decimals=3,
        ),
        Panel(
            "Time of the experts in a step",
            "The slowest ranks of all layers together, over the last decision's steps: under the layout that was met first (left_alone), as served, and under the best known. At the price of eplb_time_price_info: measured, fitted to step times, stated or assumed.",
            [(of("eplb_experts_seconds"), f"{LEGEND} {{{{placement}}}}")],
            size=(12, 8),
            unit="s",
        ),
        Panel(
            "Time saved per step",
            "Left alone less as served, with its 95 % interval. Where the interval holds 0, balancing is not shown to help.",
            [
                (of("eplb_gain_seconds"), f"{LEGEND} saved"),
                (of("eplb_gain_low_seconds"), f"{LEGEND} at least"),
                (of("eplb_gain_high_seconds"), f"{LEGEND} at most"),
            ],
            size=(12, 8),
            unit="s",
        ),
        Panel(
            "Wall time of a step",
            "As the ranks' hosts measured it, waits for requests left out; absent where agents do not report it.",
            [(of("eplb_step_seconds"), LEGEND)],
            size=(8, 8),
            unit="s",
        ),
        Panel(
            "Tokens per second saved",
            "What the time saved amounts to, where hosts report their tokens.",
            [(of("eplb_gain_tokens_per_second"), LEGEND)],
            size=(8, 8),
        ),
        Panel(
            "Price of time",
            "Where what tokens cost comes from: measured, fitted to this deployment's step times, stated or assumed.",
            [(of("eplb_time_price_info"), f"{LEGEND} {{{{price}}}}")],
            size=(8, 8),
            style=STAIRS,
            decimals=0,
        ),
        Panel(
            "Realised PAR above the floor, by layer",
            "One row per layer, colder is better.",
            [
                (
                    joined("eplb_par_realised", "-", "eplb_noise_floor", ", layer"),
                    f"{LEGEND} layer {{{{layer}}}}",
                )
            ],
            "status-history",
            (12, 12),
            decimals=2,
            thresholds=GREEN_TO_RED,
        ),
        Panel(
            "Load of each rank over the mean",
            "One row per rank, mean over layers: a rank that stays hot is placed badly, or counts others' tokens. Rank by layer is on the service's own page.",
            [(of("eplb_rank_load"), f"{LEGEND} rank {{{{rank}}}}")],
            "status-history",
            (12, 12),
            decimals=2,
            thresholds=((None, "blue"), (0.95, "green"), (1.05, "yellow"), (1.2, "orange"), (1.5, "red")),
        ),
        Panel(
            "The eight worst layers: realised",
            "Layers with the highest measured ratio at each time.",
            [(f"topk(8, {of('eplb_par_realised')})", f"{LEGEND} layer {{{{layer}}}}")],
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
                    f"{LEGEND} layer {{{{layer}}}}",
                )
            ],
            size=(12, 9),
            decimals=3,
        ),
    ),
)
