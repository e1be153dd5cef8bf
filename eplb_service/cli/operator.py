"""Questions and orders to a running service, from ``eplb deployments`` to ``eplb forget``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eplb_core.figures import digits, size_text
from eplb_core.placement import Placement
from eplb_core.wire.codec import unpack
from eplb_core.wire.generated import operator_pb2
from eplb_core.wire.operator import as_document
from eplb_service.cli.client import NAME, Connection
from eplb_service.cli.options import JSON, RESULTS, UserError, option, takes_options
from eplb_service.cli.output import print_json, table_of
from eplb_service.cli.trace_options import DRAFT_LAYERS, FIRST_LAYER, FORMAT, check_placement_output
from eplb_service.io.placement_file import SUFFIXES, write_placement

_FILE_HELP = f"File to write it to: {' or '.join(SUFFIXES)}."
_IDLE_SECONDS = 30.0
"""Age of the newest step above which the output states the age of its figures."""
_MAX_ROWS = 8
"""Layers, and ranks, that ``eplb status`` shows where it is not asked for all."""


@takes_options()
def deployments(service: Connection, json: bool = JSON) -> None:
    """List the deployments."""
    answer = _ask(service, "ListDeployments", operator_pb2.ListDeploymentsRequest())
    if json:
        print_json(as_document(answer))
        return
    columns = {
        "deployment": lambda one: escape(one.deployment),
        "agents": lambda one: f"{one.agents_connected}/{one.ranks}",
        "epoch": lambda one: one.epoch,
        "PAR": lambda one: ratio_text(one.par),
        "moved": lambda one: size_text(one.bytes_moved),
        "lost steps": lambda one: f"{one.steps_lost:,}",
        "state": state_text,
    }
    none = "no deployments yet: no agent has connected"
    Console().print(table_of(answer.deployments, columns) if answer.deployments else none)


@takes_options()
def status(
    service: Connection,
    deployment: str = NAME,
    explain: bool = option(
        False, "Also show what the times and prices rest on.", "--explain", section=RESULTS
    ),
    all: bool = option(False, f"Show every layer and rank, not the {_MAX_ROWS} to look at first.", "--all"),
    json: bool = JSON,
) -> None:
    """Show one deployment: balance, agents, last decision."""
    answer = _ask(service, "GetStatus", operator_pb2.GetStatusRequest(deployment=deployment))
    if json:
        print_json(as_document(answer))
        return
    console = Console()
    console.print(summary_table(answer))
    for problem in answer.status.problems:
        console.print(f"[red]problem:[/] {escape(problem)}", highlight=False)
    for line in explanations(answer.status) if explain else ():
        console.print(line, highlight=False, markup=False)
    most = None if all else _MAX_ROWS
    console.print(layer_table(answer.layers, most), agent_table(answer.agents, most))


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
    """Show or save the placement in force."""
    check_placement_output(out, format, first_layer, draft_layers)
    answer = _ask(service, "GetPlacement", operator_pb2.GetPlacementRequest(deployment=deployment))
    found = Placement(unpack(answer.physical_to_logical, (None, None, None), "placement"), answer.experts)
    axes = (found.ranks, found.layers, found.experts)
    entries = () if len(answer.log2phy.shape) == len(axes) else (None,)
    tables_RLE = unpack(answer.log2phy, (*axes, *entries), "log2phy")
    if out is not None:
        numbers = None if first_layer is None else range(first_layer, first_layer + found.layers)
        write_placement(out, found, tables_RLE, format, numbers, draft_layers or 0)
        typer.echo(f"eplb: wrote epoch {answer.epoch} to {out}", err=json)
    if json:
        print_json({"epoch": answer.epoch, "phy2log": found.phy2log_LRS, "log2phy": tables_RLE})
    elif out is None:
        Console().print(placement_table(answer.epoch, found))


@takes_options()
def pause(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Stop planning for a deployment; a plan under way is finished."""
    _ask(service, "Pause", operator_pb2.PauseRequest(deployment=deployment))
    _report(json, f"planning for {deployment} is paused", deployment=deployment, paused=True)


@takes_options()
def resume(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Plan for a paused deployment again."""
    _ask(service, "Resume", operator_pb2.ResumeRequest(deployment=deployment))
    _report(
        json,
        f"planning for {deployment} continues; ranks that report an error come back by themselves",
        deployment=deployment,
        paused=False,
    )


@takes_options()
def rebalance(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Decide now instead of at the next interval."""
    answer = _ask(service, "Rebalance", operator_pb2.RebalanceRequest(deployment=deployment))
    _report(json, answer.outcome, **as_document(answer))


@takes_options()
def lead(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Have a deployment's ranks follow this service, though they have followed one of a higher leader term.

    For a service that the ranks take to be outdated because the clock of another was once wrong, or because another was
    started after it and is gone. Stop the other one first.
    """
    answer = _ask(service, "Lead", operator_pb2.LeadRequest(deployment=deployment))
    line = f"the ranks of {deployment} know of no service that is newer than this one"
    if answer.raised:
        line = f"the ranks of {deployment} follow this service, at leader term {answer.leader_term}"
    _report(json, line, deployment=deployment, leader_term=answer.leader_term, raised=answer.raised)


@takes_options()
def forget(service: Connection, deployment: str = NAME, json: bool = JSON) -> None:
    """Remove a deployment whose ranks are gone: history, metrics, alerts, and whether it is paused."""
    _ask(service, "Forget", operator_pb2.ForgetRequest(deployment=deployment))
    _report(json, f"{deployment} is forgotten", deployment=deployment, forgotten=True)


@takes_options()
def history(
    service: Connection,
    deployment: str = NAME,
    plan: int | None = option(None, "Show every layer of this plan."),
    limit: int = option(20, "Most plans, the newest ones.", min=1, max=100),
    json: bool = JSON,
) -> None:
    """Show past plans: PAR seen and planned, noise floor, moves, the reason for each layer, and the outcome."""
    request = operator_pb2.GetHistoryRequest(deployment=deployment, limit=100 if plan else limit)
    plans = list(_ask(service, "GetHistory", request).plans)
    if plan is not None:
        plans = [past for past in plans if past.plan_id == plan]
        if not plans:
            raise UserError(f"{deployment} has no plan {plan} among its newest; `eplb history` lists them")
    if json:
        print_json({"plans": [as_document(past) for past in plans]})
        return
    console = Console()
    if not plans:
        typer.echo(f"{deployment} has had no plan yet: every decision so far kept all layers")
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
    with service.open() as call:
        return call(name, request)


def _report(json: bool, line: str, **document: Any) -> None:
    if json:
        print_json(document)
    else:
        typer.echo(f"eplb: {line}")


def _plan_layers(past: operator_pb2.PastPlan) -> Table:
    """One row per layer, in order."""
    columns = {
        "layer": lambda verdict: verdict.layer,
        "PAR seen": lambda verdict: ratio_text(verdict.par_seen),
        "planned": lambda verdict: ratio_text(verdict.par_planned),
        "floor": lambda verdict: ratio_text(verdict.noise_floor),
        "moves": lambda verdict: verdict.moves,
        "why": lambda verdict: escape(verdict.reason),
    }
    return table_of(past.verdicts, columns, ("why",))


def _outcome(past: operator_pb2.PastPlan) -> str:
    if not past.outcome:
        return "under way"
    outcome = escape(past.outcome.replace("_", " "))
    shown = f"[green]{outcome}[/]" if past.outcome == "done" else f"[red]{outcome}[/]"
    return f"{shown}: {escape(past.reason)}" if past.reason else shown


def _mean(past: operator_pb2.PastPlan, field: str) -> str:
    values = [getattr(verdict, field) for verdict in past.verdicts]
    ratios = [value for value in values if not math.isnan(value)]
    return ratio_text(fmean(ratios) if ratios else math.nan)


def ratio_text(value: float) -> str:
    """A peak-to-average ratio; a dash where none was measured, or no token served."""
    return f"{value:.3f}" if value > 0 else "-"


def summary_table(answer: operator_pb2.GetStatusResponse) -> Table:
    """A deployment as a whole, a line or more for each fact."""
    status = answer.status
    table = Table(show_header=False, title=escape(status.deployment))
    rows = {
        "shape": shape_text(status),
        "agents": connected_text(answer.agents, status.ranks),
        "placement": f"epoch {status.epoch}, digest {status.digest:#018x}",
        "PAR": par_text(status),
        "steps": f"{status.steps_received:,} received, {status.steps_lost:,} lost",
        "switched": f"{status.layers_switched:,} layers, {status.experts_moved:,} experts, "
        f"{size_text(status.bytes_moved)}",
        "last decision": escape(status.last_decision) or "none yet",
        "state": state_text(status),
    }
    if status.HasField("forecast"):
        rows["gain forecast"] = forecast_text(status.forecast)
    if status.HasField("worth"):
        rows["gain"] = gain_text(status)
    if hottest := hottest_text(status):
        rows["hottest"] = hottest
    rows["redundancy"] = redundancy_text(status)
    if status.HasField("move_price"):
        rows["price of moves"] = escape(move_price_text(status.move_price))
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def connected_text(agents: Sequence[operator_pb2.AgentStatus], ranks: int) -> str:
    """Ranks connected, their nodes, and how far the model is."""
    connected = [agent for agent in agents if agent.connected]
    nodes = len({agent.node for agent in connected})
    at = (
        f" on {nodes} node{'s'[nodes == 1 :]}, at step {max(agent.step for agent in connected):,}"
        if nodes
        else ""
    )
    return f"{len(connected)} of {ranks} ranks connected{at}"


def layer_table(layers: Sequence[operator_pb2.LayerStatus], most: int | None = None) -> Table:
    """Balance of each layer, or of the ``most`` with the highest PAR."""
    title = None
    if most is not None and len(layers) > most:
        title = f"highest PAR of {len(layers)} layers (--all: each)"
        layers = sorted(layers, key=lambda layer: -layer.par)[:most]
    columns = {
        "layer": lambda layer: layer.layer,
        "PAR": lambda layer: ratio_text(layer.par),
        "planned": lambda layer: ratio_text(layer.planned_par),
        "epoch": lambda layer: layer.epoch,
    }
    return table_of(layers, columns, title=title)


def agent_table(agents: Sequence[operator_pb2.AgentStatus], most: int | None = None) -> Table:
    """Each rank's agent, or the ``most`` that have an error or are behind; text wraps beside numbers that are whole."""
    title = None
    if most is not None and len(agents) > most:
        title = f"first to look at of {len(agents)} ranks (--all: each)"
        agents = sorted(agents, key=lambda one: (one.connected, not one.error, -one.dropped_steps, one.step))
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
    return table_of(agents[:most], columns, ("node", "agent", "error"), title)


def placement_table(epoch: int, placement: Placement) -> Table:
    """A line, or more, for each rank of each layer: a column for each rank would leave no room for experts."""
    places = [(layer, rank) for layer in range(placement.layers) for rank in range(placement.ranks)]
    columns = {
        "layer": lambda place: place[0],
        "rank": lambda place: place[1],
        "expert in each slot": lambda place: " ".join(map(str, placement.phy2log_LRS[place])),
    }
    return table_of(places, columns, ("expert in each slot",), f"epoch {epoch}")


def shape_text(status: operator_pb2.DeploymentStatus) -> str:
    """Layers, experts, ranks and slots."""
    return f"{status.layers} layers x {status.experts} experts on {status.ranks} ranks x {status.slots} slots"


def state_text(status: operator_pb2.DeploymentStatus) -> str:
    """Its state in one word or two, with rich's markup."""
    if status.problems:
        return f"[red]{len(status.problems)} problem{'s' if len(status.problems) > 1 else ''}[/]"
    if status.paused:
        return "[yellow]paused[/]"
    return "switching" if status.plan_id else "[green]well[/]"


def forecast_text(forecast: operator_pb2.Forecast) -> str:
    """Ratio that is expected to be won until the next decision, in one line."""
    low, gain, high = (digits(par) for par in (forecast.gain_low, forecast.gain, forecast.gain_high))
    return f"PAR {gain} until the next decision (95 %: {low} to {high})"


def par_text(status: operator_pb2.DeploymentStatus) -> str:
    """Balance of the newest steps, as served and left alone; a dash while nothing is served."""
    if not status.par > 0:
        return "-"
    late = idle_text(status)
    shown = (
        f"{ratio_text(status.par)}{f', {late} ago' if late else ''} over the newest {status.par_steps} steps"
    )
    if status.HasField("worth"):
        return f"{shown}, {ratio_text(status.worth.par_left_alone)} left alone"
    return shown


def idle_text(status: operator_pb2.DeploymentStatus) -> str:
    """Time since the newest step, if that is too long ago for its figures to be of now; otherwise nothing."""
    if not status.HasField("idle_seconds") or status.idle_seconds < _IDLE_SECONDS:
        return ""
    return duration_text(status.idle_seconds)


def duration_text(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def gain_text(status: operator_pb2.DeploymentStatus) -> str:
    """Gain of balancing in one line: its share of PAR, and time if that was measured; with rich's markup."""
    worth = status.worth
    lower = f"PAR {digits(-worth.par_gain_percent, sign='+')} %"
    if worth.HasField("gain_ms"):
        colour = {"helps": "green", "costs": "red"}.get(worth.verdict, "yellow")
        low, gain, high = (
            digits(ms, sign="+") for ms in (worth.gain_low_ms, worth.gain_ms, worth.gain_high_ms)
        )
        percent = digits(worth.gain_percent, 2, "+")
        ranks = digits(worth.ranks_worth, 2)
        rate = worth.tokens_per_second_won
        won = f", {digits(rate, sign='+')} tokens/s" if worth.HasField("tokens_per_second_won") else ""
        return (
            f"[{colour}]{escape(worth.verdict)}[/]: {gain} ms per step (99 %: {low} to {high}), {percent} %{won}, "
            f"worth {ranks} of {status.ranks} ranks; {lower}; {escape(worth.reason)}"
        )
    line = f"{lower}; time {escape(worth.verdict)}: {escape(worth.reason)}"
    if worth.HasField("estimate_low_ms"):
        low = digits(worth.estimate_low_ms, sign="+")
        high = digits(worth.estimate_high_ms, sign="+")
        line += f"; estimate by the {escape(worth.price_kind)} cost of tokens: {low} to {high} ms per step"
    return line


def hottest_text(status: operator_pb2.DeploymentStatus) -> str:
    """Name the most loaded rank and the layer of the highest ratio; nothing if none was measured."""
    if not (status.HasField("hottest_rank") and status.HasField("hottest_layer")):
        return ""
    return (
        f"rank {status.hottest_rank} ({status.hottest_rank_load:.2f} x the mean), "
        f"layer {status.hottest_layer} (PAR {status.hottest_layer_par:.2f})"
    )


def redundancy_text(status: operator_pb2.DeploymentStatus) -> str:
    """Slots beyond one per expert, and the memory that they take."""
    held = status.redundant_bytes_per_rank
    memory = f", {size_text(held)} per rank" if held else ""
    return f"{status.redundant_slots} redundant slots per layer{memory}"


def move_price_text(priced: operator_pb2.MovePrice) -> str:
    """Price of moving weights: in time where that is known, else the fall of a ratio that it takes."""
    if priced.HasField("ms_per_move"):
        return f"{digits(priced.ms_per_move)} ms per expert, {priced.kind}"
    return f"PAR must fall by {digits(100 * priced.price)} % for every slot to move, {priced.kind}"


def explanations(status: operator_pb2.DeploymentStatus) -> list[str]:
    """Reasons for the times and prices of a deployment, a sentence for each."""
    lines = []
    if status.HasField("worth"):
        worth = status.worth
        lines.append(f"gain: over the newest {worth.steps} steps; {worth.reason}")
        if worth.price:
            lines.append(f"cost of tokens, {worth.price_kind}: {worth.price}")
    if status.HasField("move_price"):
        lines.append(f"price of moves, {status.move_price.kind}: {status.move_price.reason}")
    return lines
