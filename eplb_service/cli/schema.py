"""``eplb schema``: the JSON schema of what a command prints with ``--json``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from eplb_service.cli.demo.documents import DemoDocument
from eplb_service.cli.errors import UserError
from eplb_service.cli.offline.documents import (
    AdviceDocument,
    BenchDocument,
    ReplayDocument,
    SolveDocument,
    SweepDocument,
)
from eplb_service.cli.operator.documents import (
    ForgottenDocument,
    LeadDocument,
    PausedDocument,
    PlacementDocument,
)
from eplb_service.cli.trace.documents import (
    CopyDocument,
    RecordedDocument,
    TraceInfoDocument,
    TraceStatisticsDocument,
)
from eplb_service.cost.curve_file import CurveDocument
from eplb_service.wire.document import schema_of
from eplb_service.wire.generated import operator_pb2

_OWN: dict[str, type[BaseModel]] = {
    "solve": SolveDocument,
    "replay": ReplayDocument,
    "sweep": SweepDocument,
    "advise": AdviceDocument,
    "bench": BenchDocument,
    "calibrate": CurveDocument,
    "trace record": RecordedDocument,
    "trace info": TraceInfoDocument,
    "trace stats": TraceStatisticsDocument,
    "trace convert": CopyDocument,
    "trace slice": CopyDocument,
    "trace synth": CopyDocument,
    "demo": DemoDocument,
    "placement": PlacementDocument,
    "pause": PausedDocument,
    "resume": PausedDocument,
    "lead": LeadDocument,
    "forget": ForgottenDocument,
}
_OF_SERVICE: dict[str, Any] = {
    "deployments": operator_pb2.ListDeploymentsResponse,
    "status": operator_pb2.GetStatusResponse,
    "history": operator_pb2.GetHistoryResponse,
    "rebalance": operator_pb2.RebalanceResponse,
}
"""Answers of a service that are printed as they are, field by field."""
COMMANDS = (*_OWN, *_OF_SERVICE)
"""Commands that have ``--json``, subcommands with their group."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(
    command: Annotated[
        list[str] | None, typer.Argument(help="Such as: status, or trace info; without it all are listed.")
    ] = None,
) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json."""
    if not command:
        typer.echo("\n".join(COMMANDS))
        return
    name = " ".join(command)
    if name not in COMMANDS:
        raise UserError(f"{name!r} prints no JSON; choose one of {', '.join(COMMANDS)}")
    typer.echo(schema_text(name), nl=False)


def schema_text(command: str) -> str:
    """The schema of one of ``COMMANDS`` as a JSON file has it."""
    return json.dumps(schema_document(command), indent=2) + "\n"


def schema_document(command: str) -> dict[str, Any]:
    """The schema of one of ``COMMANDS``."""
    head = {"$schema": _DIALECT, "title": f"eplb {command} --json"}
    if command in _OF_SERVICE:
        return head | schema_of(_OF_SERVICE[command].DESCRIPTOR)
    plain: dict[str, Any] = _plain(_OWN[command].model_json_schema(mode="serialization"))
    return head | plain


def _plain(schema: Any) -> Any:
    """Without the titles that pydantic makes of fields' names, and without refusing what later versions may add."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = {"title": str, "additionalProperties": bool}
    return {
        key: _plain(value)
        for key, value in schema.items()
        if key not in left_out or not isinstance(value, left_out[key])
    }
