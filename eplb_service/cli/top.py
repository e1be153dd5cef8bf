"""``eplb top``: a running service in a terminal, live: its deployments, and one of them by rank and layer.

Everything fits the terminal that it is drawn for, whatever the deployment's size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from eplb_service.cli.client import Connection, OperatorCalls
from eplb_service.cli.operator import (
    move_price_text,
    ratio_text,
    shape_text,
    size_text,
    state_text,
    worth_text,
)
from eplb_service.cli.options import UserError, argument, option, takes_options
from eplb_service.cli.output import compact_table
from eplb_service.placement import Float64
from eplb_service.wire.codec import unpack
from eplb_service.wire.generated import operator_pb2

_FEWEST_SECONDS = 0.2
_BLOCKS = " ▁▂▃▄▅▆▇█"
_HOT = 1.25
_SHADES = ((1.0, "blue"), (1.1, "green"), (_HOT, "yellow"), (1.5, "dark_orange"))
"""Load over mean up to which a cell has a colour."""
_ABOVE = "red"
_CHART_ROWS = 6
_MOST_CHART_WIDTH = 100
_MARGIN = 22
_LINES_BESIDE_MAP = 21
_FEWEST_MAP_ROWS = 8
_MOVES_NAMED = 6
_LAYERS_NAMED = 5
_Deployments: TypeAlias = Sequence[operator_pb2.DeploymentStatus]
_Status: TypeAlias = operator_pb2.GetStatusResponse | None
_Balance: TypeAlias = operator_pb2.GetBalanceResponse | None


@takes_options()
def top(
    service: Connection,
    deployment: str | None = argument(None, "Deployment to look into; by default the one with most ranks."),
    every: float = option(2.0, "Seconds from one look to the next.", min=_FEWEST_SECONDS),
    once: bool = option(False, "Print one look and leave.", "--once"),
) -> None:
    """Watch a running service: balance over time, ranks and layers, the last switch, agents, problems.

    Leave with Ctrl-C.
    """
    console = Console()
    if once or not console.is_terminal:
        with service.open() as call:
            console.print(
                render(*_look(call, deployment), console.width, console.height if not once else None)
            )
        return
    with Live(Text("connecting", style="dim"), console=console, screen=True, auto_refresh=False) as live:
        shown: RenderableType = Text("")
        while True:
            try:
                with service.open() as call:
                    while True:
                        shown = render(*_look(call, deployment), console.width, console.height)
                        live.update(shown, refresh=True)
                        time.sleep(every)
            except UserError as error:
                # A service that restarts is what one watches for: it may be back at the next look.
                live.update(Text(str(error), style="bold red"), refresh=True)
                time.sleep(every)


def _look(call: OperatorCalls, name: str | None) -> tuple[_Deployments, _Status, _Balance]:
    """Ask for all that one look shows; raises ``UserError`` where there is no such deployment."""
    known = list(call("ListDeployments", operator_pb2.ListDeploymentsRequest()).deployments)
    if name is None and known:
        name = max(known, key=lambda status: (status.agents_connected, status.ranks)).deployment
    if name is None:
        return known, None, None
    whole = call("GetStatus", operator_pb2.GetStatusRequest(deployment=name))
    balance = call("GetBalance", operator_pb2.GetBalanceRequest(deployment=name))
    return known, whole, balance


def render(
    known: _Deployments, whole: _Status, balance: _Balance, width: int, height: int | None
) -> RenderableType:
    """Draw deployments, and one of them in full, for a terminal of this size.

    Every layer has its line where there is no ``height``.
    """
    if whole is None or balance is None:
        return Text("no deployments yet: no agent has connected")
    status = whole.status
    priced = _worth_and_price(status, cut=height is not None)
    beside = _LINES_BESIDE_MAP + len(status.problems) + len(priced)
    rows = None if height is None else max(_FEWEST_MAP_ROWS, height - beside)
    parts: list[RenderableType] = []
    if len(known) > 1:
        parts.append(_deployments(known, status.deployment))
    parts += [
        _headline(status),
        *(Text.from_markup(f"[red]problem:[/] {escape(problem)}") for problem in status.problems),
        *priced,
        _over_time(balance.points, width),
        _map(balance, whole.layers, width, rows),
        _last_switch(balance, width),
        _agents(whole.agents, status.ranks),
    ]
    return Group(*parts)


def _deployments(known: Sequence[operator_pb2.DeploymentStatus], shown: str) -> Table:
    table = compact_table("deployment", "agents", "PAR", "state")
    for status in known:
        agents = f"{status.agents_connected}/{status.ranks}"
        style = "bold" if status.deployment == shown else None
        table.add_row(status.deployment, agents, ratio_text(status.par), state_text(status), style=style)
    return table


def _headline(status: operator_pb2.DeploymentStatus) -> Text:
    return Text.from_markup(
        f"[bold]{status.deployment}[/]  {state_text(status)}  {shape_text(status)}, "
        f"{status.layers_switched} layers switched, "
        f"{status.experts_moved} experts ({size_text(status.bytes_moved)}) moved, {status.steps_lost} steps lost"
    )


def _worth_and_price(status: operator_pb2.DeploymentStatus, cut: bool) -> list[Text]:
    """Worth of balancing and price of moves where they are known: a line each if ``cut``, whole if not."""
    known = []
    if status.HasField("worth"):
        known.append(f"worth: {worth_text(status.worth)}")
    if status.HasField("move_price"):
        known.append(f"price of moves, {escape(move_price_text(status.move_price))}")
    lines = [Text.from_markup(line) for line in known]
    for line in lines if cut else ():
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _over_time(points: Sequence[operator_pb2.BalancePoint], width: int) -> RenderableType:
    """Realised PAR as columns of blocks from 1 to the highest, the floor's height in another colour."""
    if not points:
        return Text("nothing measured yet", style="dim")
    columns = min(_MOST_CHART_WIDTH, max(10, width - _MARGIN))
    newest = points[-1]
    values = np.array([(point.par, point.noise_floor) for point in points[-columns:]])
    high = max(1.05, float(np.nanmax(values)))
    lines = []
    for row in reversed(range(_CHART_ROWS)):
        line = Text(f"{1 + (high - 1) * (row + 1) / _CHART_ROWS:5.2f} ", style="dim")
        for par, floor in values:
            filled = np.clip((par - 1) / (high - 1) * _CHART_ROWS - row, 0, 1)
            chance = not math.isnan(floor) and (floor - 1) / (high - 1) * _CHART_ROWS > row + 0.5
            line.append(_BLOCKS[round(float(filled) * 8)], style="bright_black" if chance else "blue")
        lines.append(line)
    known = {"now": newest.par, "planned": newest.par_planned, "floor": newest.noise_floor}
    facts = [f"{name:<9}{ratio_text(value)}" for name, value in known.items()]
    for line, fact in zip(lines, facts, strict=False):
        line.pad_right(columns + 6 - line.cell_len)
        line.append(f"  {fact}")
    since = f"      PAR over {_duration(newest.at - points[-columns:][0].at)}; grey: about what chance leaves"
    return Group(*lines, Text(since, style="dim"))


def _map(
    balance: operator_pb2.GetBalanceResponse,
    layers: Sequence[operator_pb2.LayerStatus],
    width: int,
    rows: int | None,
) -> RenderableType:
    """Ranks across, layers down; where there is no room, a cell is the most loaded of several."""
    if not balance.HasField("rank_loads"):
        return Text("")
    loads_LR: Float64 = unpack(balance.rank_loads, (None, None), "rank_loads") / 1000.0
    labels = _parts(len(loads_LR), rows or len(loads_LR))
    columns = _parts(loads_LR.shape[1], max(8, width - _MARGIN))
    lines = [Text(f"load over mean by layer and rank, newest {balance.load_steps} steps", style="dim")]
    for first, last in labels:
        name = f"{first}" if last == first + 1 else f"{first}-{last - 1}"
        line = Text(f"{name:>7} ", style="dim")
        for begin, end in columns:
            line.append("■", style=_colour(float(loads_LR[first:last, begin:end].max())))
        par = max((layer.par for layer in layers[first:last]), default=0.0)
        planned = max((layer.planned_par for layer in layers[first:last]), default=0.0)
        line.append(f" {ratio_text(par)} ", style="bold" if par > _HOT else "")
        line.append(f"{ratio_text(planned)}" if planned else "", style="dim")
        lines.append(line)
    legend = Text("        ")
    for bound, shade in _SHADES:
        legend.append("■ ", style=shade).append(f"to {bound:g}  ", style="dim")
    legend.append("■ ", style=_ABOVE).append("above; ", style="dim")
    legend.append("then PAR, planned", style="dim")
    return Group(*lines, legend)


def _colour(load: float) -> str:
    return next((shade for bound, shade in _SHADES if load <= bound), _ABOVE)


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """``count`` things in at most ``most`` parts of nearly equal size."""
    parts = min(count, most)
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(bounds))


def _last_switch(balance: operator_pb2.GetBalanceResponse, width: int) -> RenderableType:
    if not balance.HasField("last_plan"):
        return Text("no plan since the service started", style="dim")
    plan = balance.last_plan
    moves = {of_layer.layer: unpack(of_layer.moves, (None, 5), "moves") for of_layer in plan.moves}
    changed = sorted(
        (verdict for verdict in plan.verdicts if verdict.changed),
        key=lambda verdict: verdict.par_planned - verdict.par_seen,
    )
    outcome = escape(plan.outcome.replace("_", " ")) or "under way"
    title = (
        f"plan {plan.plan_id}, {_duration(time.time() - plan.at)} ago, {outcome}: "
        f"{plan.committed} of {len(changed)} layers, {sum(verdict.moves for verdict in changed)} moves"
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=title,
        title_justify="left",
        title_style="bold",
        width=width,
    )
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("PAR", no_wrap=True)
    table.add_column("expert: from > to rank", ratio=2)
    table.add_column("why", ratio=2)
    for verdict in changed[:_LAYERS_NAMED]:
        named = [
            f"{expert}:{source}>{target}" for source, _, target, _, expert in moves.get(verdict.layer, [])
        ]
        more = f" +{len(named) - _MOVES_NAMED}" if len(named) > _MOVES_NAMED else ""
        ratios = f"{verdict.par_seen:.3f} to {verdict.par_planned:.3f}"
        table.add_row(
            str(verdict.layer), ratios, " ".join(named[:_MOVES_NAMED]) + more, escape(verdict.reason)
        )
    return table


def _agents(agents: Sequence[operator_pb2.AgentStatus], ranks: int) -> RenderableType:
    connected = [agent for agent in agents if agent.connected]
    nodes = len({agent.node for agent in agents})
    step = max((agent.step for agent in connected), default=0)
    line = Text(f"{len(connected)} of {ranks} ranks connected on {nodes} nodes, at step {step}")
    for agent in agents:
        if agent.error or agent.dropped_steps:
            fault = agent.error or f"{agent.dropped_steps} steps dropped"
            line.append(f"\nrank {agent.rank}: {fault}", style="red" if agent.error else "yellow")
    return line


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
