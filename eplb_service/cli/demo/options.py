"""Options of ``eplb demo`` on its service, its decisions and where results go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError
from eplb_service.planner.settings import POLICIES
from eplb_service.wire.fields import check_deployment

WINDOW, INTERVAL = 64, 32
"""Steps, of the demo's own service where none are asked for."""


@dataclass(frozen=True)
class ServiceOptions:
    """Which service the ranks join."""

    SECTION: ClassVar = "The service"

    address: Annotated[
        str | None,
        typer.Option(help="host:port of a running service to join, instead of one of the demo's own."),
    ] = None
    deployment: Annotated[str, typer.Option(help="Name that the ranks give.")] = "demo"
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of the own service's metrics and web page (default a free one)."
        ),
    ] = None

    def check(self, decisions: DecisionOptions) -> None:
        """Raise ``UserError`` where an option is given that the service at ``address`` decides about."""
        check_deployment(self.deployment, "--deployment")
        if self.address is not None:
            set_there = {
                "--window": decisions.window,
                "--interval": decisions.interval,
                "--policy": decisions.policy,
                "--metrics-port": self.metrics_port,
            }
            refuse_given("a service of the demo's own, without --address", set_there)


@dataclass(frozen=True)
class DecisionOptions:
    """How the service decides."""

    SECTION: ClassVar = "How decisions are made"

    window: Annotated[
        int | None, typer.Option(min=1, help=f"Steps that a decision looks at (default {WINDOW}).")
    ] = None
    interval: Annotated[
        int | None, typer.Option(min=1, help=f"Steps from one decision to the next (default {INTERVAL}).")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(POLICIES)} (default flashlb).", autocompletion=lambda: list(POLICIES)
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seeds requests or tokens, and the solver.")] = 0


@dataclass(frozen=True)
class OutputOptions:
    """Where the results go."""

    SECTION: ClassVar = "Results"

    json: Annotated[Path | None, typer.Option(help="Write the summary to this .json file.")] = None
    record: Annotated[
        Path | None, typer.Option(help="Write the heat that was served to this .npz file, a trace.")
    ] = None
    picture: Annotated[Path | None, typer.Option(help="Write the last view to this .svg file.")] = None

    def check(self) -> None:
        """Raise ``OutputError`` where a file could not be written; before the ranks start."""
        for path, suffix in ((self.json, ".json"), (self.record, ".npz"), (self.picture, ".svg")):
            if path is not None:
                check_output(path, (suffix,))


def refuse_given(belongs_to: str, options: Mapping[str, int | str | None]) -> None:
    """Raise ``UserError`` where an option is given that means nothing here."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} goes with {belongs_to} alone")
