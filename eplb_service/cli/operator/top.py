"""``eplb top``: a running service in a terminal, live: its deployments, and one of them by rank and layer."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from eplb_service.cli.errors import UserError
from eplb_service.cli.operator.client import Connection, OperatorCalls
from eplb_service.cli.operator.top_view import Picture, render
from eplb_service.cli.options.groups import option_groups
from eplb_service.wire.generated import operator_pb2

_FEWEST_SECONDS = 0.2


@option_groups
def top(
    service: Connection,
    deployment: Annotated[
        str | None, typer.Argument(help="Deployment to look into; the one with most ranks where not given.")
    ] = None,
    every: Annotated[
        float, typer.Option(min=_FEWEST_SECONDS, help="Seconds from one look to the next.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and leave.")] = False,
) -> None:
    """Watch a running service: balance over time, ranks and layers, the last switch, agents, problems.

    Leave with Ctrl-C.
    """
    console = Console()
    if once or not console.is_terminal:
        with service.open() as call:
            console.print(render(look(call, deployment), console.width, console.height if not once else None))
        return
    with Live(Text("connecting", style="dim"), console=console, screen=True, auto_refresh=False) as live:
        shown: RenderableType = Text("")
        while True:
            try:
                with service.open() as call:
                    while True:
                        shown = render(look(call, deployment), console.width, console.height)
                        live.update(shown, refresh=True)
                        time.sleep(every)
            except UserError as error:
                # A service that restarts is what one watches for: it may be back at the next look.
                live.update(Text(str(error), style="bold red"), refresh=True)
                time.sleep(every)


def look(call: OperatorCalls, name: str | None) -> Picture:
    """All that one look shows; raises ``UserError`` where there is no such deployment."""
    known = list(call("ListDeployments", operator_pb2.ListDeploymentsRequest()).deployments)
    if name is None and known:
        name = max(known, key=lambda status: (status.agents_connected, status.ranks)).deployment
    if name is None:
        return Picture(known)
    whole = call("GetStatus", operator_pb2.GetStatusRequest(deployment=name))
    balance = call("GetBalance", operator_pb2.GetBalanceRequest(deployment=name))
    return Picture(known, whole, balance)
