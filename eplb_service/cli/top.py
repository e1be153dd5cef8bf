"""``eplb top``: a running service in a terminal, live: its deployments, and one of them by rank and layer.

Everything fits the terminal that it is drawn for, whatever the deployment's size.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from eplb_core.figures import size_text
from eplb_core.placement import Float64
from eplb_core.wire.codec import unpack
from eplb_core.wire.generated import operator_pb2
from eplb_service.cli.client import Connection, OperatorCalls
from eplb_service.cli.operator import (
    connected_text,
    duration_text,
    gain_text,
    hottest_text,
    idle_text,
    move_price_text,
    ratio_text,
    redundancy_text,
    shape_text,
    state_text,
)
from eplb_service.cli.options import UserError, argument, option, takes_options
from eplb_service.cli.output import table_of

_BLOCKS = " ▁▂▃▄▅▆▇█"
_HOT = 1.25
_SHADES = ((1.0, "blue"), (1.1, "green"), (_HOT, "yellow"), (1.5, "dark_orange"))
"""Load over mean up to which a cell has a colour."""
_ABOVE = "red"
_CHART_ROWS = 6
_LOW_CHART_ROWS = 2
_LOW_SCREEN = 40
"""Lines of a terminal below which only what fits beside the map is shown."""
_MAX_CHART_WIDTH = 100
_MARGIN = 22
_LINES_BESIDE_MAP = 21
_LINES_BESIDE_LOW_MAP = 7
_MIN_MAP_ROWS = 5
_MAX_SHOWN = 2
"""Problems, and troubled ranks, that a low screen shows; the rest are counted."""
_LAYERS_NAMED = 5
_Deployments: TypeAlias = Sequence[operator_pb2.DeploymentStatus]
_Status: TypeAlias = operator_pb2.GetStatusResponse | None
_Balance: TypeAlias = operator_pb2.GetBalanceResponse | None


@takes_options()
def top(
    service: Connection,
    deployment: str | None = argument(None, "Deployment to look into; by default the one with most ranks."),
    every: float = option(2.0, "Seconds from one look to the next.", min=0.2),
    once: bool = option(False, "Print one look and leave.", "--once"),
) -> None:
    """Watch a running service: balance over time, ranks and layers, the last switch, agents, problems.

    Leave with q or Ctrl-C.
    """
    console = Console()
    if once or not console.is_terminal:
        with service.open() as call:
            console.print(render(*_look(call, deployment), console.width, None if once else console.height))
        return
    with (
        Live(Text("connecting", style="dim"), console=console, screen=True, auto_refresh=False) as live,
        _keys() as asked_to_leave,
    ):
        while not asked_to_leave(0.0):
            try:
                with service.open() as call:
                    while True:
                        shown = render(*_look(call, deployment), console.width, console.height)
                        live.update(shown, refresh=True)
                        if asked_to_leave(every):
                            return
            except UserError as error:
                # A service that restarts is what one watches for: it may be back at the next look.
                live.update(Text(str(error), style="bold red"), refresh=True)
                if asked_to_leave(every):
                    return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys. Yields a function that waits up to some seconds and returns True if the user pressed q."""
    if not sys.stdin.isatty():
        yield _only_wait
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _q_pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _q_pressed(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        left = max(0.0, until - time.monotonic())
        if not select.select([sys.stdin], [], [], left)[0]:
            return False
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True


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
    status, low = whole.status, height is not None and height < _LOW_SCREEN
    lines = [
        Text.from_markup(line, overflow="ellipsis")
        for line in [*_facts(status, _MAX_SHOWN if low else None), *(_others(known, status) if low else ())]
    ]
    for line in lines if height is not None else ():
        line.no_wrap = True
    agents = _agents(whole, _MAX_SHOWN if low else None)
    rows = None
    if height is not None:
        beside = _LINES_BESIDE_LOW_MAP + len(agents.plain.splitlines()) if low else _LINES_BESIDE_MAP
        rows = max(_MIN_MAP_ROWS, height - beside - len(lines))
    columns = {
        "deployment": lambda one: escape(one.deployment),
        "agents": lambda one: f"{one.agents_connected}/{one.ranks}",
        "PAR": lambda one: ratio_text(one.par),
        "state": state_text,
    }
    return Group(
        *([table_of(known, columns)] if len(known) > 1 and not low else []),
        *lines,
        _over_time(balance.points, width, _LOW_CHART_ROWS if low else _CHART_ROWS),
        _map(balance, whole.layers, width, rows),
        _last_switch(balance, title_alone=low),
        agents,
    )


def _facts(status: operator_pb2.DeploymentStatus, most: int | None) -> list[str]:
    """A line for each fact about a deployment, with rich's markup; at most ``most`` of its problems."""
    shown = status.problems[:most]
    facts = [
        f"[bold]{escape(status.deployment)}[/]  {state_text(status)}  {shape_text(status)}",
        *(f"[red]problem:[/] {escape(problem)}" for problem in shown),
    ]
    if len(status.problems) > len(shown):
        facts.append(f"[red]and {len(status.problems) - len(shown)} more problems[/]")
    facts.insert(1, _balance_line(status))
    if status.HasField("worth"):
        facts.insert(2, f"gain: {gain_text(status)}")
    price = f"; price {escape(move_price_text(status.move_price))}" if status.HasField("move_price") else ""
    moved = f"moved: {status.layers_switched:,} layers, {size_text(status.bytes_moved)}{price}"
    facts.append(f"{moved}; {redundancy_text(status)}")
    return facts


def _balance_line(status: operator_pb2.DeploymentStatus) -> str:
    """Balance now and left alone, and where it is worst."""
    late = idle_text(status)
    shown = f"PAR [bold]{ratio_text(status.par)}[/] {f'{late} ago' if late else 'now'}"
    if status.HasField("worth"):
        shown += f", {ratio_text(status.worth.par_left_alone)} left alone"
    hottest = hottest_text(status)
    return f"{shown}; hottest {hottest}" if hottest else shown


def _others(known: _Deployments, shown: operator_pb2.DeploymentStatus) -> list[str]:
    """One line for all other deployments, those with problems first; none where there is no other."""
    others = sorted(
        (one for one in known if one.deployment != shown.deployment),
        key=lambda one: (not one.problems, not one.paused, -one.par),
    )
    each = (f"{escape(one.deployment)} {ratio_text(one.par)} {state_text(one)}" for one in others)
    return [f"{len(others)} more: {', '.join(each)}"] if others else []


def _over_time(points: Sequence[operator_pb2.BalancePoint], width: int, rows: int) -> RenderableType:
    """Realised PAR as columns of blocks from 1 to the highest, and PAR left alone as dashes above them."""
    if not points:
        return Text("nothing measured yet", style="dim")
    newest = points[-1]
    shown = points[-min(_MAX_CHART_WIDTH, max(10, width - _MARGIN)) :]
    known = [value for point in shown for value in (point.par, point.par_left_alone) if value > 0]
    high = max(1.05, *known) if known else 1.05
    lines = []
    for row in reversed(range(rows)):
        line = Text(f"{1 + (high - 1) * (row + 1) / rows:5.2f} ", style="blue")
        for point in shown:
            block = _BLOCKS[round(8 * min(max(0.0, (point.par - 1) / (high - 1) * rows - row), 1.0))]
            left_alone = (point.par_left_alone - 1) / (high - 1) * rows - row
            dashed = block == " " and 0 < left_alone <= 1
            line.append("╌" if dashed else block, style="red" if dashed else "blue")
        lines.append(line)
    facts = {
        "realised": newest.par,
        "left alone": newest.par_left_alone,
        "planned": newest.par_planned,
        "floor": newest.noise_floor,
    }
    figures = ", ".join(f"{name} {ratio_text(value)}" for name, value in facts.items())
    span = duration_text(newest.at - shown[0].at)
    return Group(*lines, Text(f"      PAR over {span}, last: {figures}", style="dim"))


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
    columns = _parts(loads_LR.shape[1], max(8, width - _MARGIN))
    lines = [Text(f"load over mean by layer and rank, newest {balance.load_steps} steps", style="dim")]
    for first, last in _parts(len(loads_LR), rows or len(loads_LR)):
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
    legend.append("■ ", style=_ABOVE).append("above; then PAR, planned", style="dim")
    return Group(*lines, legend)


def _colour(load: float) -> str:
    return next((shade for bound, shade in _SHADES if load <= bound), _ABOVE)


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """``count`` things in at most ``most`` parts of nearly equal size."""
    parts = min(count, most)
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(bounds))


def _last_switch(balance: operator_pb2.GetBalanceResponse, title_alone: bool) -> RenderableType:
    if not balance.HasField("last_plan"):
        return Text("no plan since the service started", style="dim")
    plan = balance.last_plan
    changed = [verdict for verdict in plan.verdicts if verdict.changed]
    most = sorted(changed, key=lambda verdict: verdict.par_planned - verdict.par_seen)[:_LAYERS_NAMED]
    outcome = escape(plan.outcome.replace("_", " ")) or "under way"
    title = (
        f"plan {plan.plan_id}, {duration_text(time.time() - plan.at)} ago, {outcome}: {plan.committed} of "
        f"{len(changed)} layers, {sum(verdict.moves for verdict in changed)} moves"
    )
    if title_alone:
        line = Text.from_markup(title, overflow="ellipsis")
        line.no_wrap = True
        return line
    columns = {
        "layer": lambda verdict: verdict.layer,
        "PAR": lambda verdict: f"{verdict.par_seen:.3f} to {verdict.par_planned:.3f}",
        "moves": lambda verdict: verdict.moves,
        "why": lambda verdict: escape(verdict.reason),
    }
    return table_of(most, columns, ("why",), title)


def _agents(whole: operator_pb2.GetStatusResponse, most: int | None) -> Text:
    lost = f", {whole.status.steps_lost:,} steps lost" if whole.status.steps_lost else ""
    line = Text(f"{connected_text(whole.agents, whole.status.ranks)}{lost}")
    line.no_wrap, line.overflow = most is not None, "ellipsis"
    troubled = [agent for agent in whole.agents if agent.error or agent.dropped_steps]
    for agent in troubled[:most]:
        fault = agent.error or f"{agent.dropped_steps:,} steps dropped"
        line.append(f"\nrank {agent.rank}: {fault}", style="red" if agent.error else "yellow")
    if most is not None and len(troubled) > most:
        line.append(f"\nand {len(troubled) - most} more ranks", style="red")
    return line
