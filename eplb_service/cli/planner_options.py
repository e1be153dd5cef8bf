"""Gives a command an option for every setting of the planner, and for where the ranks stand."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from eplb_service.cli.errors import UserError, whole_numbers
from eplb_service.io.trace import Trace
from eplb_service.planner.options import PlannerOption, planner_options
from eplb_service.planner.topology import Topology

Command = TypeVar("Command", bound=Callable[..., None])

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
    """Replace a command's ``**planner`` by one option a setting, but for those that it names itself."""

    def decorated(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        made = [_parameter(option) for option in planner_options() if option.name not in without]
        # typer reads a command's options off its signature.
        command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *made)}
        return command

    return decorated


def topology_of(ranks: int, nodes: str | None, token_group: int, trace: Trace) -> Topology:
    """Where ``ranks`` ranks stand, of the options above; raises ``UserError`` where that cannot be."""
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


def _parameter(option: PlannerOption) -> inspect.Parameter:
    flag = f"--{option.name.replace('_', '-')}"
    declared = typer.Option(
        option.default,
        f"{flag}/--no-{flag[2:]}" if option.kind is bool else flag,
        help=option.words,
        rich_help_panel=PANEL,
    )
    kind: Any = option.kind if option.default is not None else option.kind | None
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=kind)
