"""Options that every command which reads a trace has: where it is, and what to take it for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from eplb_service.cli.errors import UserError
from eplb_service.heat.window import HeatError
from eplb_service.io.array_meaning import MEANINGS
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import KNOWN
from eplb_service.io.placement_file import read_phy2log
from eplb_service.io.routes import DEFAULT_BATCH
from eplb_service.io.trace import Trace
from eplb_service.placement import PlacementError

HeatOption = Annotated[Path, typer.Option(help=f"Trace: {KNOWN}; the content decides the format.")]
TraceArgument = Annotated[Path, typer.Argument(help=f"Trace: {KNOWN}; the content decides the format.")]

_STEPS_READ = 64


@dataclass(frozen=True)
class ReadingOptions:
    """How a file is read that does not say itself what it holds."""

    SECTION: ClassVar = "How the trace is read"

    read_as: Annotated[
        str | None,
        typer.Option("--as", help=f"What the file's array is, where it is not named: {', '.join(MEANINGS)}."),
    ] = None
    map: Annotated[
        Path | None,
        typer.Option(
            help="Expert in each slot [layers, slots], for tokens by slot: .npz, .npy, .json, .yaml, .pt."
        ),
    ] = None
    experts: Annotated[
        int | None, typer.Option(min=1, help="Logical experts per layer, where the file does not name them.")
    ] = None
    batch: Annotated[
        int, typer.Option(min=1, help="Requests decoded side by side, where routes become steps.")
    ] = DEFAULT_BATCH
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Experts that a token chooses in a layer, where routes do not say it."),
    ] = None

    def reading(self) -> ReadAs:
        """How to read the trace; raises ``UserError`` on an unknown meaning or a map that cannot be read."""
        if self.read_as is not None and self.read_as not in MEANINGS:
            raise UserError(f"--as names {self.read_as!r}; choose one of {', '.join(MEANINGS)}")
        phy2log = None
        if self.map is not None:
            try:
                phy2log = read_phy2log(self.map)
            except (HeatError, PlacementError) as error:
                raise UserError(f"{self.map}: {error}") from error
        return ReadAs(self.read_as, phy2log, self.experts, self.batch, self.top_k)


def check_tokens(path: Path, trace: Trace) -> None:
    """Raise ``UserError`` where every count of the trace is zero: nothing could be learned from it."""
    for first in range(0, trace.steps, _STEPS_READ):
        if trace.heat(first, min(trace.steps, first + _STEPS_READ)).any():
            return
    raise UserError(f"{path}: all of its {trace.steps} steps hold zero tokens; record while the model serves")


def choices_per_step(trace: Trace) -> float:
    """Tokens over all experts of a layer in a step, mean over a few steps."""
    heat_TLE = trace.heat(0, min(trace.steps, _STEPS_READ))
    return float(heat_TLE.sum(axis=2).mean())
