"""``eplb history``: past plans of a deployment, what each said of its layers, and what became of it."""

from __future__ import annotations

import math
from datetime import datetime
from statistics import fmean
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eplb_service.cli.errors import UserError
from eplb_service.cli.operator.client import Connection, Json, Name
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.output.json_out import print_json
from eplb_service.wire.document import as_document
from eplb_service.wire.generated import operator_pb2


@option_groups
def history(
    deployment: Name,
    service: Connection,
    plan: Annotated[int | None, typer.Option(help="Show every layer of this plan.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most plans, the newest ones.")] = 20,
    json: Json = False,
) -> None:
    """Show past plans: PAR seen and planned, noise floor, moves, the reason for each layer, and the outcome."""
    request = operator_pb2.GetHistoryRequest(deployment=deployment, limit=100 if plan else limit)
    with service.open() as call:
        plans = list(call("GetHistory", request).plans)
    if plan is not None:
        plans = [past for past in plans if past.plan_id == plan]
        if not plans:
            raise UserError(f"{deployment} has no plan {plan} among its newest; `eplb history` lists them")
    if json:
        print_json({"plans": [as_document(past) for past in plans]})
        return
    console = Console()
    if plan is not None:
        console.print(_headline(plans[0]), _layers(plans[0]))
    elif plans:
        console.print(_table(deployment, plans))
    else:
        console.print(f"{deployment} has had no plan yet: every decision so far kept all layers")


def _table(deployment: str, plans: list[operator_pb2.PastPlan]) -> Table:
    """One row per plan, newest first; figures are means over all layers."""
    table = Table(
        title=f"{deployment}, newest first",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("plan", no_wrap=True)
    table.add_column("offered", no_wrap=True)
    for heading in ("PAR planned", "floor", "layers", "moves"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outcome", min_width=12)
    for past in plans:
        changed = [verdict for verdict in past.verdicts if verdict.changed]
        table.add_row(
            str(past.plan_id),
            _when(past),
            f"{_mean(past, 'par_seen')} to {_mean(past, 'par_planned')}",
            _mean(past, "noise_floor"),
            f"{past.committed}/{len(changed)}",
            str(sum(verdict.moves for verdict in changed)),
            _outcome(past),
        )
    return table


def _layers(past: operator_pb2.PastPlan) -> Table:
    """One row per layer, in order."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("layer", "PAR seen", "planned", "floor", "hindsight", "moves"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why")
    for verdict in past.verdicts:
        table.add_row(
            str(verdict.layer),
            _ratio(verdict.par_seen),
            _ratio(verdict.par_planned),
            _ratio(verdict.noise_floor),
            _ratio(verdict.hindsight) if verdict.HasField("hindsight") else "-",
            str(verdict.moves),
            escape(verdict.reason),
            style="bold" if verdict.changed else None,
        )
    return table


def _headline(past: operator_pb2.PastPlan) -> str:
    changed = sum(verdict.changed for verdict in past.verdicts)
    return (
        f"plan {past.plan_id}, offered {_when(past)} at epoch {past.base_epoch}: {_outcome(past)}; "
        f"{past.committed} of {changed} layers switched"
    )


def _outcome(past: operator_pb2.PastPlan) -> str:
    if not past.outcome:
        return "under way"
    outcome = past.outcome.replace("_", " ")
    shown = f"[green]{outcome}[/]" if past.outcome == "done" else f"[red]{outcome}[/]"
    return f"{shown}: {escape(past.reason)}" if past.reason else shown


def _when(past: operator_pb2.PastPlan) -> str:
    return datetime.fromtimestamp(past.at).astimezone().strftime("%d %b %H:%M:%S")


def _mean(past: operator_pb2.PastPlan, field: str) -> str:
    values = [getattr(verdict, field) for verdict in past.verdicts]
    ratios = [value for value in values if not math.isnan(value)]
    return _ratio(fmean(ratios) if ratios else math.nan)


def _ratio(value: float) -> str:
    """NaN, the ratio of a layer without tokens, as a dash."""
    return "-" if math.isnan(value) else f"{value:.3f}"
