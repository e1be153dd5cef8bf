"""Commands that query or control a running service, from ``eplb deployments`` to ``eplb forget``.

They import neither the planner nor the solver, so that they start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eplb_core.figures import ratio_text, size_text
from eplb_core.placement import Placement
from eplb_core.wire.codec import unpack
from eplb_core.wire.generated import operator_pb2
from eplb_core.wire.operator import as_document
from eplb_service.cli.client import NAME, Connection
from eplb_service.cli.file_options import DRAFT_LAYERS, FIRST_LAYER, FORMAT, check_placement_output
from eplb_service.cli.options import JSON, RESULTS, UserError, option, takes_options
from eplb_service.cli.output import print_json, table_of
from eplb_service.io.placement_file import SUFFIXES, write_placement
from eplb_service.telemetry.deployment_figures import Figure, explanations, figures_of

_FILE_HELP = f"File to write the placement to: {' or '.join(SUFFIXES)}."
_MAX_ROWS = 8
"""Maximum number of layers and of ranks that ``eplb status`` shows without ``--all``."""


@takes_options()
def deployments(service: Connection, json: bool = JSON) -> None:
    """List the deployments."""
    response = _ask(service, "ListDeployments", operator_pb2.ListDeploymentsRequest())
    if json:
        print_json(as_document(response))
        return
    if response.deployments:
        Console().print(deployments_table(response.deployments))
    else:
        Console().print("no deployments yet: no agent has connected")


@takes_options()
def status(
    service: Connection,
    deployment: str = NAME,
    explain: bool = option(
        False, "Also show the reasons behind the times and prices.", "--explain", section=RESULTS
    ),
    all: bool = option(
        False, f"Show every layer and rank instead of the {_MAX_ROWS} most notable ones.", "--all"
    ),
    json: bool = JSON,
) -> None:
    """Show a deployment: balance, agents, and the last decision."""
    response = _ask(service, "GetStatus", operator_pb2.GetStatusRequest(deployment=deployment))
    if json:
        print_json(as_document(response))
        return
    console = Console()
    console.print(summary_table(response))
    for problem in response.status.problems:
        console.print(f"[red]problem:[/] {escape(problem)}", highlight=False)
    for line in explanations(response.status) if explain else ():
        console.print(line, highlight=False, markup=False)
    limit = None if all else _MAX_ROWS
    console.print(layer_table(response.layers, limit), agent_table(response.agents, limit))


@takes_options()
def placement(
    service: Connection,
    deployment: str = NAME,
    out: Path | None = option(None, _FILE_HELP, section=RESULTS),
    format: str | None = FORMAT,
    first_layer: int | None = FIRST_LAYER,
    draft_layers: int | None = DRAFT_LAYERS,
    json: bool = JSON,
) -> None:
    """Show or save the current placement."""
    check_placement_output(out, format, first_layer, draft_layers)
    response = _ask(service, "GetPlacement", operator_pb2.GetPlacementRequest(deployment=deployment))
    phy2log_LRS = unpack(response.physical_to_logical, (None, None, None), "placement")
    current = Placement(phy2log_LRS, response.experts)
    axes = (current.ranks, current.layers, current.experts)
    # Dealing tables have an additional axis for the entries of an expert.
    entries = () if len(response.log2phy.shape) == len(axes) else (None,)
    tables_RLE = unpack(response.log2phy, (*axes, *entries), "log2phy")
    if out is not None:
        numbers = None if first_layer is None else range(first_layer, first_layer + current.layers)
        write_placement(out, current, tables_RLE, format, numbers, draft_layers or 0)
        typer.echo(f"eplb: wrote epoch {response.epoch} to {out}", err=json)
    if json:
        print_json({"epoch": response.epoch, "phy2log": current.phy2log_LRS, "log2phy": tables_RLE})
    elif out is None:
        Console().print(placement_table(response.epoch, current))


@takes_options()
def pause(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Pause planning for a deployment. A plan in progress is still completed."""
    _ask(service, "Pause", operator_pb2.PauseRequest(deployment=deployment))
    _report(json, f"planning for {deployment} is paused", deployment=deployment, paused=True)


@takes_options()
def resume(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Resume planning for a paused deployment."""
    _ask(service, "Resume", operator_pb2.ResumeRequest(deployment=deployment))
    _report(
        json,
        f"planning for {deployment} continues; ranks that report an error recover automatically",
        deployment=deployment,
        paused=False,
    )


@takes_options()
def rebalance(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Make a decision now instead of at the next interval."""
    response = _ask(service, "Rebalance", operator_pb2.RebalanceRequest(deployment=deployment))
    _report(json, response.outcome, **as_document(response))


@takes_options()
def lead(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Make a deployment's ranks follow this service, even if they have followed one with a higher leader term.

    Use this command if the ranks treat this service as outdated because another service's clock was once wrong, or
    because another service was started later and is gone. Stop the other service first.
    """
    response = _ask(service, "Lead", operator_pb2.LeadRequest(deployment=deployment))
    line = f"no rank of {deployment} has followed a service newer than this one; nothing was changed"
    if response.raised:
        line = f"the ranks of {deployment} follow this service, at leader term {response.leader_term}"
    _report(json, line, deployment=deployment, leader_term=response.leader_term, raised=response.raised)


@takes_options()
def forget(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Remove a deployment whose ranks are gone, with its history, metrics, alerts, and paused state."""
    _ask(service, "Forget", operator_pb2.ForgetRequest(deployment=deployment))
    _report(json, f"{deployment} has been forgotten", deployment=deployment, forgotten=True)


@takes_options()
def history(
    service: Connection,
    deployment: str = NAME,
    plan: int | None = option(None, "Show every layer of this plan."),
    limit: int = option(20, "Maximum number of plans, newest first.", min=1, max=100),
    json: bool = JSON,
) -> None:
    """Show past plans: observed and planned PAR, noise floor, moves, the reason for each layer, and the outcome."""
    request = operator_pb2.GetHistoryRequest(deployment=deployment, limit=100 if plan else limit)
    plans = list(_ask(service, "GetHistory", request).plans)
    if plan is not None:
        plans = [past for past in plans if past.plan_id == plan]
        if not plans:
            raise UserError(
                f"{deployment} has no plan {plan} among its newest 100; `eplb history` lists its plans"
            )
    if json:
        print_json({"plans": [as_document(past) for past in plans]})
        return
    console = Console()
    if not plans:
        typer.echo(f"{deployment} has had no plans yet: every decision so far left all layers unchanged")
        return
    columns = {
        "plan": lambda past: past.plan_id,
        "offered": lambda past: datetime.fromtimestamp(past.at).astimezone().strftime("%d %b %H:%M:%S"),
        "PAR planned": lambda past: f"{_mean(past, 'par_seen')} to {_mean(past, 'par_planned')}",
        "floor": lambda past: _mean(past, "noise_floor"),
        "layers": lambda past: f"{past.committed}/{sum(verdict.changed for verdict in past.verdicts)}",
        "moves": lambda past: sum(verdict.moves for verdict in past.verdicts if verdict.changed),
        "outcome": _outcome,
    }
    console.print(table_of(plans, columns, ("outcome",), f"{deployment}, newest first"))
    if plan is not None:
        console.print(_plan_layers(plans[0]))


def _ask(service: Connection, name: str, request: Any) -> Any:
    """Connect to the service, make one call, and return the response."""
    with service.open() as call:
        return call(name, request)


def _report(json: bool, line: str, **document: Any) -> None:
    """Print the result of a command, either as JSON or as one line of text."""
    if json:
        print_json(document)
    else:
        typer.echo(f"eplb: {line}")


def _plan_layers(past: operator_pb2.PastPlan) -> Table:
    """Return a table with one row per layer in the plan."""
    columns = {
        "layer": lambda verdict: verdict.layer,
        "PAR before": lambda verdict: ratio_text(verdict.par_seen),
        "planned": lambda verdict: ratio_text(verdict.par_planned),
        "floor": lambda verdict: ratio_text(verdict.noise_floor),
        "moves": lambda verdict: verdict.moves,
        "reason": lambda verdict: escape(verdict.reason),
    }
    return table_of(past.verdicts, columns, ("reason",))


def _outcome(past: operator_pb2.PastPlan) -> str:
    if not past.outcome:
        return "under way"
    outcome = escape(past.outcome.replace("_", " "))
    coloured = f"[green]{outcome}[/]" if past.outcome == "done" else f"[red]{outcome}[/]"
    return f"{coloured}: {escape(past.reason)}" if past.reason else coloured


def _mean(past: operator_pb2.PastPlan, field: str) -> str:
    values = [getattr(verdict, field) for verdict in past.verdicts]
    ratios = [value for value in values if not math.isnan(value)]
    return ratio_text(fmean(ratios) if ratios else math.nan)


def deployments_table(deployments: Sequence[operator_pb2.DeploymentStatus]) -> Table:
    """Return a table with one row per deployment."""
    columns = {
        "deployment": lambda status: escape(status.deployment),
        "agents": lambda status: f"{status.agents_connected}/{status.ranks}",
        "epoch": lambda status: status.epoch,
        "PAR": lambda status: ratio_text(status.par),
        "moved": lambda status: size_text(status.bytes_moved),
        "lost steps": lambda status: f"{status.steps_lost:,}",
        "state": state_text,
    }
    return table_of(deployments, columns)


def summary_table(response: operator_pb2.GetStatusResponse) -> Table:
    """Return a table with the facts about a deployment, one per row."""
    status = response.status
    table = Table(show_header=False, title=escape(status.deployment))
    table.add_row("state", state_text(status))
    table.add_row("shape", shape_text(status))
    table.add_row("agents", connected_text(response.agents, status.ranks))
    table.add_row("placement", f"epoch {status.epoch}, digest {status.digest:#018x}")
    for figure in chain(*figures_of(status).values()):
        table.add_row(figure.name, figure_text(figure))
    table.add_row("last decision", escape(status.last_decision) or "none yet")
    return table


def figure_text(figure: Figure) -> str:
    """Return a figure's value and note, with rich markup."""
    colour = {"good": "green", "warn": "yellow", "bad": "red"}.get(figure.tone, "bold")
    return f"[{colour}]{escape(figure.value)}[/], {escape(figure.note)}"


def connected_text(agents: Sequence[operator_pb2.AgentStatus], ranks: int) -> str:
    """Format the number of connected ranks, the number of their nodes, and the newest step."""
    connected = [agent for agent in agents if agent.connected]
    text = f"{len(connected)} of {ranks} ranks connected"
    if not connected:
        return text
    nodes = len({agent.node for agent in connected})
    newest_step = max(agent.step for agent in connected)
    return f"{text} on {nodes} node{'' if nodes == 1 else 's'}, at step {newest_step:,}"


def layer_table(layers: Sequence[operator_pb2.LayerStatus], limit: int | None = None) -> Table:
    """Return a table of the balance of each layer, or of the ``limit`` layers with the highest PAR."""
    title = None
    if limit is not None and len(layers) > limit:
        title = f"highest PAR among {len(layers)} layers (all layers: --all)"
        layers = sorted(layers, key=lambda layer: -layer.par)[:limit]
    columns = {
        "layer": lambda layer: layer.layer,
        "PAR": lambda layer: ratio_text(layer.par),
        "planned": lambda layer: ratio_text(layer.planned_par),
        "epoch": lambda layer: layer.epoch,
    }
    return table_of(layers, columns, title=title)


def agent_table(agents: Sequence[operator_pb2.AgentStatus], limit: int | None = None) -> Table:
    """Return a table of the ranks' agents.

    If ``limit`` is given, the table shows only that many agents: first the disconnected ones, then those with an error,
    then those with the most dropped steps, and then the slowest.
    """
    title = None
    if limit is not None and len(agents) > limit:
        title = f"most notable among {len(agents)} ranks (all ranks: --all)"
        agents = sorted(
            agents, key=lambda agent: (agent.connected, not agent.error, -agent.dropped_steps, agent.step)
        )
    columns = {
        "rank": lambda agent: agent.rank,
        "connected": lambda agent: "yes" if agent.connected else "[red]no[/]",
        "step": lambda agent: agent.step,
        "epoch": lambda agent: agent.epoch,
        "dropped": lambda agent: agent.dropped_steps,
        "node": lambda agent: escape(agent.node),
        "agent": lambda agent: escape(agent.agent_version),
        "error": lambda agent: escape(agent.error),
    }
    return table_of(agents[:limit], columns, ("node", "agent", "error"), title)


def placement_table(epoch: int, placement: Placement) -> Table:
    """Return a table with a row for each rank of each layer.

    With one column per rank, the columns would be too narrow to list the experts.
    """
    rows = [(layer, rank) for layer in range(placement.layers) for rank in range(placement.ranks)]
    columns = {
        "layer": lambda row: row[0],
        "rank": lambda row: row[1],
        "expert in each slot": lambda row: " ".join(map(str, placement.phy2log_LRS[row])),
    }
    return table_of(rows, columns, ("expert in each slot",), f"epoch {epoch}")


def shape_text(status: operator_pb2.DeploymentStatus) -> str:
    """Format the numbers of layers, experts, ranks and slots."""
    return f"{status.layers} layers x {status.experts} experts on {status.ranks} ranks x {status.slots} slots"


def state_text(status: operator_pb2.DeploymentStatus) -> str:
    """Return the state of a deployment, with rich markup."""
    if status.problems:
        return f"[red]{len(status.problems)} problem{'s' if len(status.problems) > 1 else ''}[/]"
    if status.paused:
        return "[yellow]paused[/]"
    if status.observed:
        return "[green]observed[/]"
    return "switching" if status.plan_id else "[green]healthy[/]"
