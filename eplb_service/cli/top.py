"""``eplb top``: live terminal view of a service's deployments, and of one deployment by rank and layer.

The view fits in the terminal, regardless of the deployment's size.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from eplb_core.figures import duration_text, ratio_text
from eplb_core.placement import Float64
from eplb_core.wire.codec import unpack
from eplb_core.wire.generated import operator_pb2
from eplb_service.cli.client import Connection, OperatorCalls
from eplb_service.cli.operator import (
    connected_text,
    deployments_table,
    figure_text,
    shape_text,
    state_text,
)
from eplb_service.cli.options import UserError, argument, option, takes_options
from eplb_service.cli.output import table_of
from eplb_service.telemetry.deployment_figures import Figure, figures_of

_BLOCKS = " ▁▂▃▄▅▆▇█"
_HOT = 1.25
_SHADES = ((1.0, "blue"), (1.1, "green"), (_HOT, "yellow"), (1.5, "dark_orange"))
"""Upper bound on the ratio of load to mean load for each colour of a map cell."""
_HOTTEST_SHADE = "red"
"""Colour of a cell above all bounds."""
_CHART_ROWS = 6
_COMPACT_CHART_ROWS = 2
_COMPACT_HEIGHT = 40
"""Terminals with fewer lines get the compact view, which leaves more room for the map."""
_MAX_CHART_WIDTH = 100
_MARGIN = 22
"""Number of columns beside the map and the chart."""
_LINES_BESIDE_MAP = 21
_LINES_BESIDE_COMPACT_MAP = 7
_MIN_MAP_ROWS = 5
_MAX_COMPACT_ITEMS = 2
"""Maximum number of problems, and of troubled ranks, listed in the compact view. The rest are only counted."""
_MAX_PLAN_LAYERS = 5
"""Maximum number of layers of the last plan that are shown."""
_Deployments: TypeAlias = Sequence[operator_pb2.DeploymentStatus]
_Status: TypeAlias = operator_pb2.GetStatusResponse | None
_Balance: TypeAlias = operator_pb2.GetBalanceResponse | None


@takes_options()
def top(
    service: Connection,
    deployment: str | None = argument(
        None, "Deployment to show in detail; by default the one with the most ranks."
    ),
    every: float = option(2.0, "Seconds between updates.", min=0.2),
    once: bool = option(False, "Print the view once and exit.", "--once"),
) -> None:
    """Watch a service live: balance over time, ranks and layers, the last switch, agents, and problems.

    Press q or Ctrl-C to quit.
    """
    console = Console()
    if once or not console.is_terminal:
        with service.open() as call:
            console.print(render(*_fetch(call, deployment), console.width, None if once else console.height))
        return
    with (
        Live(Text("connecting", style="dim"), console=console, screen=True, auto_refresh=False) as live,
        _keys() as quits_within,
    ):
        while not quits_within(0.0):
            try:
                with service.open() as call:
                    while True:
                        view = render(*_fetch(call, deployment), console.width, console.height)
                        live.update(view, refresh=True)
                        if quits_within(every):
                            return
            except UserError as error:
                # The service may be restarting, so keep trying to reconnect.
                live.update(Text(str(error), style="bold red"), refresh=True)
                if quits_within(every):
                    return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys from the terminal.

    Yields a function that waits up to the given number of seconds and returns True if the user pressed q.
    """
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
    deadline = time.monotonic() + seconds
    while True:
        remaining = max(0.0, deadline - time.monotonic())
        if not select.select([sys.stdin], [], [], remaining)[0]:
            return False
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True


def _fetch(call: OperatorCalls, name: str | None) -> tuple[_Deployments, _Status, _Balance]:
    """Fetch the data of one update. Raises ``UserError`` if there is no such deployment."""
    response = call("ListDeployments", operator_pb2.ListDeploymentsRequest())
    deployments = list(response.deployments)
    if name is None and deployments:
        name = max(deployments, key=lambda status: (status.agents_connected, status.ranks)).deployment
    if name is None:
        return deployments, None, None
    details = call("GetStatus", operator_pb2.GetStatusRequest(deployment=name))
    balance = call("GetBalance", operator_pb2.GetBalanceRequest(deployment=name))
    return deployments, details, balance


def render(
    deployments: _Deployments, details: _Status, balance: _Balance, width: int, height: int | None
) -> RenderableType:
    """Draw all deployments, and one of them in detail.

    Parameters
    ----------
    deployments
        Status of all deployments.
    details
        Detailed status of one deployment; ``None`` if there are no deployments.
    balance
        Balance of that deployment over time.
    width
        Terminal width in columns.
    height
        Terminal height in lines. With ``None``, the map has one line per layer and nothing is shortened.
    """
    if details is None or balance is None:
        return Text("no deployments yet: no agent has connected")
    status = details.status
    is_compact = height is not None and height < _COMPACT_HEIGHT
    item_limit = _MAX_COMPACT_ITEMS if is_compact else None
    facts = _facts(status, item_limit)
    if is_compact:
        facts += _other_deployments(deployments, status)
    lines = [Text.from_markup(line, overflow="ellipsis") for line in facts]
    for line in lines if height is not None else ():
        line.no_wrap = True
    agents = _agents(details, item_limit)
    map_rows = None
    if height is not None:
        beside = _LINES_BESIDE_MAP
        if is_compact:
            beside = _LINES_BESIDE_COMPACT_MAP + len(agents.plain.splitlines())
        map_rows = max(_MIN_MAP_ROWS, height - beside - len(lines))
    return Group(
        *([deployments_table(deployments)] if len(deployments) > 1 and not is_compact else []),
        *lines,
        _over_time(balance.points, width, _COMPACT_CHART_ROWS if is_compact else _CHART_ROWS),
        _map(balance, details.layers, width, map_rows),
        _last_switch(balance, title_only=is_compact),
        agents,
    )


def _facts(status: operator_pb2.DeploymentStatus, max_problems: int | None) -> list[str]:
    """Return the facts about a deployment, one line each, with rich markup."""
    figures = figures_of(status)
    facts = [
        f"[bold]{escape(status.deployment)}[/]  {state_text(status)}  {shape_text(status)}",
        _values(figures["balance"]),
    ]
    facts += [f"{figure.name} {figure_text(figure)}" for figure in figures["gain"]]
    problems = status.problems[:max_problems]
    facts += [f"[red]problem:[/] {escape(problem)}" for problem in problems]
    if len(status.problems) > len(problems):
        facts.append(f"[red]and {len(status.problems) - len(problems)} more problems[/]")
    return [*facts, _values(figures["cost"])]


def _values(figures: Iterable[Figure]) -> str:
    """Return the figures in one line, without their notes."""
    return "; ".join(f"{figure.name} [bold]{escape(figure.value)}[/]" for figure in figures)


def _other_deployments(deployments: _Deployments, current: operator_pb2.DeploymentStatus) -> list[str]:
    """Return one line about the other deployments, problems first; an empty list if there are no others."""
    remaining = sorted(
        (status for status in deployments if status.deployment != current.deployment),
        key=lambda status: (not status.problems, not status.paused, -status.par),
    )
    if not remaining:
        return []
    states = (
        f"{escape(status.deployment)} {ratio_text(status.par)} {state_text(status)}" for status in remaining
    )
    return [f"{len(remaining)} more: {', '.join(states)}"]


def _over_time(points: Sequence[operator_pb2.BalancePoint], width: int, rows: int) -> RenderableType:
    """Draw the realised PAR as blocks, from 1 to the highest value, and the initial layout's PAR as dashes."""
    if not points:
        return Text("nothing measured yet", style="dim")
    newest = points[-1]
    visible = points[-min(_MAX_CHART_WIDTH, max(10, width - _MARGIN)) :]
    ratios = [value for point in visible for value in (point.par, point.par_left_alone) if value > 0]
    high = max(1.05, *ratios) if ratios else 1.05
    lines = []
    for row in reversed(range(rows)):
        line = Text(f"{1 + (high - 1) * (row + 1) / rows:5.2f} ", style="blue")
        for point in visible:
            block = _BLOCKS[round(8 * min(max(0.0, (point.par - 1) / (high - 1) * rows - row), 1.0))]
            initial = (point.par_left_alone - 1) / (high - 1) * rows - row
            is_dash = block == " " and 0 < initial <= 1
            line.append("╌" if is_dash else block, style="red" if is_dash else "blue")
        lines.append(line)
    facts = {
        "realised": newest.par,
        "initial": newest.par_left_alone,
        "planned": newest.par_planned,
        "floor": newest.noise_floor,
    }
    figures = ", ".join(f"{name} {ratio_text(value)}" for name, value in facts.items())
    span = duration_text(newest.at - visible[0].at)
    return Group(*lines, Text(f"      PAR over {span}, last: {figures}", style="dim"))


def _map(
    balance: operator_pb2.GetBalanceResponse,
    layers: Sequence[operator_pb2.LayerStatus],
    width: int,
    rows: int | None,
) -> RenderableType:
    """Draw the load of each rank (columns) in each layer (rows).

    If the map does not fit, each cell covers several ranks and layers and shows their highest load.
    """
    if not balance.HasField("rank_loads"):
        return Text("")
    loads_LR: Float64 = unpack(balance.rank_loads, (None, None), "rank_loads") / 1000.0
    columns = _ranges(loads_LR.shape[1], max(8, width - _MARGIN))
    lines = [Text(f"load over mean by layer and rank, newest {balance.load_steps} steps", style="dim")]
    for first, end in _ranges(len(loads_LR), rows or len(loads_LR)):
        name = f"{first}" if end == first + 1 else f"{first}-{end - 1}"
        line = Text(f"{name:>7} ", style="dim")
        for first_rank, end_rank in columns:
            load = float(loads_LR[first:end, first_rank:end_rank].max())
            line.append("■", style=_colour(load))
        par = max((layer.par for layer in layers[first:end]), default=0.0)
        planned = max((layer.planned_par for layer in layers[first:end]), default=0.0)
        line.append(f" {ratio_text(par)} ", style="bold" if par > _HOT else "")
        line.append(f"{ratio_text(planned)}" if planned else "", style="dim")
        lines.append(line)
    legend = Text("        ")
    for bound, shade in _SHADES:
        legend.append("■ ", style=shade).append(f"to {bound:g}  ", style="dim")
    legend.append("■ ", style=_HOTTEST_SHADE).append("above; then PAR, planned", style="dim")
    return Group(*lines, legend)


def _colour(load: float) -> str:
    return next((shade for bound, shade in _SHADES if load <= bound), _HOTTEST_SHADE)


def _ranges(count: int, limit: int) -> list[tuple[int, int]]:
    """Divide ``range(count)`` into at most ``limit`` ranges of nearly equal size.

    Examples
    --------
    >>> _ranges(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    ranges = min(count, limit)
    bounds = [count * number // ranges for number in range(ranges + 1)]
    return list(pairwise(bounds))


def _last_switch(balance: operator_pb2.GetBalanceResponse, title_only: bool) -> RenderableType:
    """Draw the last plan: a title, and a table of the layers whose PAR it lowers the most."""
    if not balance.HasField("last_plan"):
        return Text("no plan since the service started", style="dim")
    plan = balance.last_plan
    changed = [verdict for verdict in plan.verdicts if verdict.changed]
    outcome = escape(plan.outcome.replace("_", " ")) or "under way"
    title = (
        f"plan {plan.plan_id}, {duration_text(time.time() - plan.at)} ago, {outcome}: {plan.committed} of "
        f"{len(changed)} layers, {sum(verdict.moves for verdict in changed)} moves"
    )
    if title_only:
        line = Text.from_markup(title, overflow="ellipsis")
        line.no_wrap = True
        return line
    best = sorted(changed, key=lambda verdict: verdict.par_planned - verdict.par_seen)[:_MAX_PLAN_LAYERS]
    columns = {
        "layer": lambda verdict: verdict.layer,
        "PAR": lambda verdict: f"{verdict.par_seen:.3f} to {verdict.par_planned:.3f}",
        "moves": lambda verdict: verdict.moves,
        "reason": lambda verdict: escape(verdict.reason),
    }
    return table_of(best, columns, ("reason",), title)


def _agents(details: operator_pb2.GetStatusResponse, limit: int | None) -> Text:
    """Return the number of connected ranks, and a line for each rank with an error or dropped steps."""
    status = details.status
    lost = f", {status.steps_lost:,} steps lost" if status.steps_lost else ""
    line = Text(f"{connected_text(details.agents, status.ranks)}{lost}")
    line.no_wrap = limit is not None
    line.overflow = "ellipsis"
    troubled = [agent for agent in details.agents if agent.error or agent.dropped_steps]
    for agent in troubled[:limit]:
        trouble = agent.error or f"{agent.dropped_steps:,} steps dropped"
        line.append(f"\nrank {agent.rank}: {trouble}", style="red" if agent.error else "yellow")
    if limit is not None and len(troubled) > limit:
        line.append(f"\nand {len(troubled) - limit} more ranks", style="red")
    return line
