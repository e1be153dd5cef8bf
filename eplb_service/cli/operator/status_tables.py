"""The tables of ``eplb status`` and ``eplb placement``: whole at 80 columns, whatever the deployment's size."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from eplb_service.cli.operator.status_text import (
    agent_memory_text,
    move_price_text,
    par_text,
    price_text,
    size_text,
    state_text,
    worth_text,
)
from eplb_service.cli.output.tables import compact_table
from eplb_service.placement import Placement
from eplb_service.wire.generated import operator_pb2


def summary_table(answer: operator_pb2.GetStatusResponse) -> Table:
    """What is known of a deployment as a whole, a line or more each."""
    status = answer.status
    table = Table(show_header=False, title=status.deployment)
    rows = {
        "shape": _shape(status),
        "agents": f"{status.agents_connected} of {status.ranks} connected",
        "placement": f"epoch {status.epoch}, digest {status.digest:#018x}",
        "PAR": f"{par_text(status.par)} over {status.window_steps} steps",
        "steps": f"{status.steps_received} received, {status.steps_lost} lost",
        "switched": f"{status.layers_switched} layers, {status.experts_moved} experts, {size_text(status.bytes_moved)}",
        "last decision": escape(status.last_decision) or "none yet",
        "state": state_text(status),
    }
    if status.HasField("worth"):
        rows["worth"] = worth_text(status.worth)
        rows["price of time"] = escape(price_text(status.worth))
    if status.HasField("move_price"):
        rows["price of moves"] = escape(move_price_text(status.move_price))
    if memory := agent_memory_text(answer.agents):
        rows["memory of agents"] = memory
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def layer_table(layers: Iterable[operator_pb2.LayerStatus]) -> Table:
    """Balance of each layer."""
    table = compact_table("layer", "PAR", "planned", "epoch")
    for layer in layers:
        table.add_row(str(layer.layer), par_text(layer.par), par_text(layer.planned_par), str(layer.epoch))
    return table


def agent_table(agents: Iterable[operator_pb2.AgentStatus]) -> Table:
    """Each rank's agent; text wraps beside numbers that are whole."""
    table = compact_table("rank", "connected", "step", "epoch", "dropped")
    for heading in ("node", "agent", "error"):
        table.add_column(heading, overflow="fold")
    for agent in agents:
        table.add_row(
            str(agent.rank),
            "yes" if agent.connected else "[red]no[/]",
            str(agent.step),
            str(agent.epoch),
            str(agent.dropped_steps),
            escape(agent.node),
            escape(agent.agent_version),
            escape(agent.error),
        )
    return table


def placement_table(epoch: int, placement: Placement) -> Table:
    """A line, or more, for each rank of each layer: a column for each rank would leave no room for experts."""
    table = compact_table("layer", "rank", title=f"epoch {epoch}")
    table.add_column("expert in each slot", overflow="fold")
    for layer, slots_RS in enumerate(placement.phy2log_LRS):
        for rank, slots_S in enumerate(slots_RS):
            table.add_row(str(layer), str(rank), " ".join(map(str, slots_S)))
        if layer + 1 < placement.layers:
            table.add_section()
    return table


def _shape(status: operator_pb2.DeploymentStatus) -> str:
    return f"{status.layers} layers x {status.experts} experts on {status.ranks} ranks x {status.slots} slots"
