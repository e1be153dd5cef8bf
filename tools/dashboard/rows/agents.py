"""The ranks' agents, and the heat that they report."""

from __future__ import annotations

from tools.dashboard.panel import LEGEND, STAIRS, Panel, Row, of, per

ROW: Row = (
    "Agents and heat",
    (
        Panel(
            "Steps per second",
            "Received: every rank's heat arrived. Lost: some rank's never did.",
            [
                (per("eplb_steps_received_total", "rate"), f"{LEGEND} received"),
                (per("eplb_steps_lost_total", "rate"), f"{LEGEND} lost"),
            ],
            size=(12, 8),
        ),
        Panel(
            "Agents",
            "Ranks whose stream is alive, ranks of the group, and ranks that no longer take part.",
            [
                (of("eplb_agents_connected"), f"{LEGEND} connected"),
                (of("eplb_agents_expected"), f"{LEGEND} expected"),
                (of("eplb_agents_halted"), f"{LEGEND} halted"),
            ],
            size=(12, 8),
            style=STAIRS,
            decimals=0,
            least=0,
        ),
        Panel(
            "What the agent takes of a step",
            "Of each call between two forward passes, mean over ranks; of that in votes, which wait for the slowest rank and commit layers. Absent where agents do not measure it.",
            [
                (
                    f"{per('eplb_agent_call_seconds_total', 'rate')} / {per('eplb_agent_calls_total', 'rate')}",
                    f"{LEGEND} all",
                ),
                (
                    f"{per('eplb_agent_vote_seconds_total', 'rate')} / {per('eplb_agent_calls_total', 'rate')}",
                    f"{LEGEND} in votes",
                ),
            ],
            unit="s",
        ),
        Panel(
            "Memory that the agents hold",
            "The rank that holds most: for experts that wait for their commit, and in the rings that layers count heat in. Staging is kept from layer to layer. Absent where agents do not report it.",
            [
                (of("eplb_agent_staging_bytes"), f"{LEGEND} staged experts"),
                (of("eplb_agent_heat_ring_bytes"), f"{LEGEND} heat rings"),
            ],
            unit="bytes",
            least=0,
        ),
        Panel(
            "Longest silence of a rank",
            "Since the service last heard a connected rank; heartbeats come every `heartbeat_seconds`.",
            [(of("eplb_agent_silent_seconds"), LEGEND)],
            unit="s",
        ),
        Panel(
            "Steps without tokens, steps dropped",
            "Newest steps in a row that were empty or dummies on all ranks, steps that agents dropped because the service was slow, and of how many reports they send one since.",
            [
                (of("eplb_empty_steps"), f"{LEGEND} empty"),
                (of("eplb_dummy_steps"), f"{LEGEND} dummy"),
                (of("eplb_dropped_steps"), f"{LEGEND} dropped"),
                (of("eplb_heat_one_in"), f"{LEGEND} reports, of which one is sent"),
            ],
            style=STAIRS,
            decimals=0,
        ),
        Panel(
            "Epoch, leader term and who leads",
            "The epoch grows with every layer that switches, the term with every service that leads. Of services with one lease, one leads.",
            [
                (of("eplb_epoch"), f"{LEGEND} epoch"),
                ('eplb_leader_term{instance=~"$instance"}', "{{instance}} leader term"),
                ('eplb_leads{instance=~"$instance"}', "{{instance}} leads"),
            ],
            style=STAIRS,
            decimals=0,
        ),
    ),
)
