"""Options that every command which asks a running service has: which deployment, where, and with what right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ADDRESS = "127.0.0.1:50551"
"""Where a service listens that was told nothing else."""

Name = Annotated[str, typer.Argument(help="Name of the deployment, as `eplb deployments` lists it.")]
Address = Annotated[str, typer.Option(help="host:port of the service.", envvar="EPLB_ADDRESS")]
Token = Annotated[
    str | None, typer.Option(help="Shared token, where the service asks for one.", envvar="EPLB_AUTH_TOKEN")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", help="PEM file of the authority behind the service's TLS.", envvar="EPLB_TLS_CA"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
