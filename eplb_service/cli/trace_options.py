"""Options that every command which reads a trace has: where it is, and what to take it for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eplb_service.cli.errors import UserError
from eplb_service.heat.window import HeatError
from eplb_service.io.named_arrays import MEANINGS, ReadAs
from eplb_service.io.open_trace import KNOWN
from eplb_service.io.placement_file import read_phy2log
from eplb_service.placement import PlacementError

HeatOption = Annotated[Path, typer.Option(help=f"Trace: {KNOWN}; its format is told by its content.")]
TraceArgument = Annotated[Path, typer.Argument(help=f"Trace: {KNOWN}; its format is told by its content.")]
AsOption = Annotated[
    str | None,
    typer.Option("--as", help=f"What the file's array is, where it does not say: {', '.join(MEANINGS)}."),
]
MapOption = Annotated[
    Path | None,
    typer.Option(
        help="Expert in each slot [layers, slots], for tokens by slot: .npz, .npy, .json, .yaml, .pt."
    ),
]
ExpertsOption = Annotated[
    int | None, typer.Option(min=1, help="Logical experts a layer, where the file does not tell.")
]
BatchOption = Annotated[
    int, typer.Option(min=1, help="Requests decoded side by side, where routes become steps.")
]


def reading(as_: str | None, map_path: Path | None, experts: int | None, batch: int) -> ReadAs:
    """How to read a trace, of the options above; raises ``UserError`` where one of them is none."""
    if as_ is not None and as_ not in MEANINGS:
        raise UserError(f"--as names {as_!r}; choose one of {', '.join(MEANINGS)}")
    phy2log = None
    if map_path is not None:
        try:
            phy2log = read_phy2log(map_path)
        except (HeatError, PlacementError) as error:
            raise UserError(f"{map_path}: {error}") from error
    return ReadAs(as_, phy2log, experts, batch)
