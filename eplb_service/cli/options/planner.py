"""Options for every setting of the planner, and for the nodes and token groups of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer

from eplb_service.cli.errors import UserError, whole_numbers
from eplb_service.cli.options.declared import (
    Command,
    flag_metavar,
    flag_type,
    setting_option,
    takes_options,
)
from eplb_service.io.trace import Trace
from eplb_service.planner.options import planner_options
from eplb_service.planner.topology import Topology

PANEL = "How decisions are made"
"""Heading under which help lists these options."""

NodesOption = Annotated[
    str | None,
    typer.Option(
        help="Nodes that the ranks are spread over, in order and evenly; or the node of each rank, with commas. "
        "By default as recorded, otherwise one.",
        rich_help_panel=PANEL,
    ),
]
TokenGroupOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Ranks next to each other that see the same tokens and so share their tables.",
        rich_help_panel=PANEL,
    ),
]


def takes_planner_settings(*without: str) -> Callable[[Command], Command]:
    """Replace a command's ``**planner`` by one option per setting, but for those that it names itself."""
    made = [
        setting_option(
            option.name,
            flag_type(option.kind),
            option.default,
            option.help,
            panel=PANEL,
            metavar=flag_metavar(option.kind),
        )
        for option in planner_options()
        if option.name not in without
    ]
    return takes_options(made)


def topology_of(ranks: int, nodes: str | None, token_group: int, trace: Trace) -> Topology:
    """Nodes and token groups of ``ranks`` ranks by the options above; raises ``UserError`` where that cannot be."""
    if ranks % token_group:
        raise UserError(f"--token-group {token_group} does not divide {ranks} ranks")
    recorded = trace.facts.nodes_R if len(trace.facts.nodes_R) == ranks else (0,) * ranks
    nodes_R = recorded if nodes is None else _nodes(ranks, nodes)
    groups_R = np.arange(ranks, dtype=np.int32) // token_group
    return Topology(np.asarray(nodes_R, dtype=np.int32), groups_R, trace.facts.bytes_per_expert)


def _nodes(ranks: int, text: str) -> tuple[int, ...]:
    if "," not in text:
        (count,) = whole_numbers("--nodes", text)
        if ranks % count:
            raise UserError(
                f"--nodes {count}: {ranks} ranks do not spread evenly over them; name each rank's node"
            )
        return tuple(rank * count // ranks for rank in range(ranks))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != ranks or not all(part.isdecimal() and len(part) < 5 for part in parts):
        raise UserError(f"--nodes {text!r}: expected a count, or the number of each of {ranks} ranks' node")
    return tuple(map(int, parts))
