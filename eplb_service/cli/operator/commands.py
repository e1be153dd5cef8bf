"""``eplb deployments | status | placement | pause | resume | rebalance | lead | forget``: ask a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError
from eplb_service.cli.operator.client import Connection, Json, Name
from eplb_service.cli.operator.status_tables import (
    agent_table,
    layer_table,
    placement_table,
    summary_table,
)
from eplb_service.cli.operator.status_text import par_text, size_text, state_text
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.layout import FirstLayerOption, FormatOption
from eplb_service.cli.output.json_out import print_json
from eplb_service.cli.output.tables import compact_table
from eplb_service.io.placement_file import SUFFIXES, placement_format, write_placement
from eplb_service.placement import Placement
from eplb_service.wire.codec import unpack
from eplb_service.wire.document import as_document
from eplb_service.wire.generated import operator_pb2


@option_groups
def deployments(service: Connection, json: Json = False) -> None:
    """List the deployments."""
    with service.open() as call:
        answer = call("ListDeployments", operator_pb2.ListDeploymentsRequest())
    if json:
        print_json(as_document(answer))
        return
    table = compact_table("deployment", "agents", "epoch", "PAR", "switched", "moved", "lost steps", "state")
    for status in answer.deployments:
        table.add_row(
            status.deployment,
            f"{status.agents_connected}/{status.ranks}",
            str(status.epoch),
            par_text(status.par),
            str(status.layers_switched),
            size_text(status.bytes_moved),
            str(status.steps_lost),
            state_text(status),
        )
    Console().print(table if answer.deployments else "no deployments yet: no agent has connected")


@option_groups
def status(
    deployment: Name,
    service: Connection,
    json: Json = False,
) -> None:
    """Show one deployment: balance, agents, last decision."""
    with service.open() as call:
        answer = call("GetStatus", operator_pb2.GetStatusRequest(deployment=deployment))
    if json:
        print_json(as_document(answer))
        return
    console = Console()
    console.print(summary_table(answer))
    for problem in answer.status.problems:
        console.print(f"[red]problem:[/] {escape(problem)}", highlight=False)
    console.print(layer_table(answer.layers), agent_table(answer.agents))


@option_groups
def placement(
    deployment: Name,
    service: Connection,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"File to write it to: {' or '.join(SUFFIXES)}.")
    ] = None,
    format: FormatOption = None,
    first_layer: FirstLayerOption = None,
    json: Json = False,
) -> None:
    """Show or save the placement in force."""
    if out is not None:
        check_output(out, SUFFIXES)
        placement_format(out, format)
    elif format is not None or first_layer is not None:
        raise UserError("--format and --first-layer say how a file is written; give it with --out")
    with service.open() as call:
        answer = call("GetPlacement", operator_pb2.GetPlacementRequest(deployment=deployment))
    found = Placement(unpack(answer.physical_to_logical, (None, None, None), "placement"), answer.experts)
    axes = (found.ranks, found.layers, found.experts)
    entries = () if len(answer.log2phy.shape) == len(axes) else (None,)
    tables_RLE = unpack(answer.log2phy, (*axes, *entries), "log2phy")
    if out is not None:
        numbers = range(first_layer or 0, (first_layer or 0) + found.layers)
        write_placement(out, found, tables_RLE, format, numbers)
        typer.echo(f"eplb: wrote epoch {answer.epoch} to {out}", err=json)
    if json:
        print_json({"epoch": answer.epoch, "phy2log": found.phy2log_LRS, "log2phy": tables_RLE})
    elif out is None:
        Console().print(placement_table(answer.epoch, found))


@option_groups
def pause(deployment: Name, service: Connection, json: Json = False) -> None:
    """Stop planning for a deployment; a plan under way is finished."""
    with service.open() as call:
        call("Pause", operator_pb2.PauseRequest(deployment=deployment))
    _report_paused(deployment, True, json)


@option_groups
def resume(deployment: Name, service: Connection, json: Json = False) -> None:
    """Plan for a paused deployment again."""
    with service.open() as call:
        call("Resume", operator_pb2.ResumeRequest(deployment=deployment))
    _report_paused(deployment, False, json)


@option_groups
def rebalance(
    deployment: Name,
    service: Connection,
    json: Json = False,
) -> None:
    """Decide now instead of at the next interval."""
    with service.open() as call:
        answer = call("Rebalance", operator_pb2.RebalanceRequest(deployment=deployment))
    if json:
        print_json(as_document(answer))
    else:
        typer.echo(f"eplb: {answer.outcome}")


@option_groups
def lead(deployment: Name, service: Connection, json: Json = False) -> None:
    """Have a deployment's ranks follow this service, though they have followed one of a higher leader term.

    For a service that the ranks take to be outdated because the clock of another was once wrong, or because another was
    started after it and is gone. Stop the other one first.
    """
    with service.open() as call:
        answer = call("Lead", operator_pb2.LeadRequest(deployment=deployment))
    if json:
        print_json({"deployment": deployment, "leader_term": answer.leader_term, "raised": answer.raised})
    elif answer.raised:
        typer.echo(
            f"eplb: the ranks of {deployment} follow this service, at leader term {answer.leader_term}"
        )
    else:
        typer.echo(f"eplb: the ranks of {deployment} know of no service that is newer than this one")


@option_groups
def forget(deployment: Name, service: Connection, json: Json = False) -> None:
    """Remove a deployment whose ranks are gone: history, metrics, alerts, and whether it is paused."""
    with service.open() as call:
        call("Forget", operator_pb2.ForgetRequest(deployment=deployment))
    if json:
        print_json({"deployment": deployment, "forgotten": True})
    else:
        typer.echo(f"eplb: {deployment} is forgotten")


def _report_paused(deployment: str, paused: bool, json: bool) -> None:
    if json:
        print_json({"deployment": deployment, "paused": paused})
    else:
        typer.echo(f"eplb: planning for {deployment} {'is paused' if paused else 'continues'}")
