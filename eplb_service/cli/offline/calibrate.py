"""``eplb calibrate``: a cost curve from this machine's own expert kernel, or from a measured table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer
from rich.console import Console

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError, whole_numbers
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json
from eplb_service.cli.output.tables import compact_table
from eplb_service.cli.repeated import SEVERAL
from eplb_service.cost.curve import PHASES, CostCurve
from eplb_service.cost.curve_file import plain_curve, write_curves
from eplb_service.cost.fit import Measurements, fit_curve
from eplb_service.cost.measured_table import Kernel, curve_from_table

_PROGRAM = "worker_agent.calibrate"
_SHOWN_TOKENS = (1, 16, 64, 256, 1024)


@dataclass(frozen=True)
class ExpertOptions:
    """The expert that is timed, or looked up in a table."""

    SECTION: ClassVar = "The expert"

    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size of the model.")] = None
    inter: Annotated[int | None, typer.Option(min=1, help="Intermediate size of one expert.")] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; with --table as it names them. By default float32."),
    ] = None
    phase: Annotated[str, typer.Option(help=f"What the curve is for: {', '.join(PHASES)}.")] = "any"


@dataclass(frozen=True)
class KernelOptions:
    """How this machine's kernel is timed."""

    SECTION: ClassVar = "Timing this machine's kernel"

    slots: Annotated[int, typer.Option(min=1, help="Experts of one rank.")] = 8
    tokens: Annotated[
        str, typer.Option(metavar=SEVERAL, help="Tokens in a busy slot to try, with commas.")
    ] = "1,4,16,32,64,128,256"
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda:0, npu:0.")] = "cpu"
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each cell; the least time counts.")] = 7
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU; by default as torch chooses.")
    ] = None


@dataclass(frozen=True)
class TableOptions:
    """A measured table, read in place of timing anything."""

    SECTION: ClassVar = "From a measured table"

    table: Annotated[
        Path | None,
        typer.Option(
            help="Parquet table of MoE kernels, as in the wheel aiconfigurator-core; nothing is timed."
        ),
    ] = None
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of the layer, where the table has several.")
    ] = None
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Choices of a token, where the table has several.")
    ] = None
    kernel: Annotated[str | None, typer.Option(help="kernel_source, where the table has several.")] = None


@dataclass(frozen=True)
class OutputOptions:
    """Where the curve goes."""

    SECTION: ClassVar = "Results"

    out: Annotated[Path, typer.Option(help="Write the curve to this .json file.")]
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False


@option_groups
def calibrate(
    expert: ExpertOptions, timing: KernelOptions, measured: TableOptions, output: OutputOptions
) -> None:
    """Fit a cost curve: how long a rank's experts take for the tokens in each of its slots.

    Times this machine's own expert kernel, before serving, on a grid of busy slots and tokens; or, with --table, fits
    what others measured. Every fourth measurement is held out; a curve that misses them is refused and not written.
    """
    check_output(output.out, (".json",))
    if expert.phase not in PHASES:
        raise UserError(f"--phase is {expert.phase!r}; choose one of {', '.join(PHASES)}")
    if measured.table is not None:
        curve = curve_from_table(measured.table, _kernel_of(expert, measured), expert.phase)
    else:
        curve = _timed(expert, timing)
    write_curves(output.out, [curve])
    if output.json:
        print_json(plain_curve(curve))
    else:
        _print(output_console(), curve, output.out)


def _kernel_of(expert: ExpertOptions, table: TableOptions) -> Kernel:
    return Kernel(expert.hidden, expert.inter, table.experts, table.top_k, expert.dtype, table.kernel)


def _timed(expert: ExpertOptions, kernel: KernelOptions) -> CostCurve:
    """The curve of this machine's kernel; raises ``UserError`` where it cannot be timed here."""
    if expert.hidden is None or expert.inter is None:
        raise UserError("give --hidden and --inter of the model's experts, or --table with a measured table")
    task = {
        "hidden": expert.hidden,
        "inter": expert.inter,
        "slots": kernel.slots,
        "tokens": whole_numbers("--tokens", kernel.tokens),
        "dtype": expert.dtype or "float32",
        "device": kernel.device,
        "repeats": kernel.repeats,
        "threads": kernel.threads,
    }
    console = Console(stderr=True, highlight=False)
    with console.status(f"timing experts of {expert.hidden} x {expert.inter} on {kernel.device}"):
        cells = list(_measured(task))
    source = (
        f"calibrated: {kernel.device}, hidden_size {expert.hidden}, inter_size {expert.inter}, {task['dtype']}, "
        f"{kernel.slots} slots"
    )
    columns = (
        np.array([cell[name] for cell in cells], dtype=np.float64) for name in ("busy", "tokens", "us")
    )
    return fit_curve(Measurements(*columns), phase=expert.phase, source=source)


def _measured(task: dict[str, Any]) -> Iterator[dict[str, float]]:
    """What the agent's program measures, in a process of its own: the service's side knows no torch."""
    command = [sys.executable, "-m", _PROGRAM, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        if "No module named 'torch'" in lines[-1]:
            raise UserError("timing experts needs torch: pip install 'eplb-service[agent]'")
        raise UserError(f"the experts could not be timed: {lines[-1]}")
    for line in done.stdout.splitlines():
        yield json.loads(line)


def _print(console: Console, curve: CostCurve, out: Path) -> None:
    console.print(f"[bold]{curve}[/]", markup=True)
    console.print(f"from {curve.source}; {curve.fit}", markup=False)
    if np.isfinite(curve.knee) and curve.knee > 0:
        console.print(
            f"Up to {curve.knee:.0f} tokens per slot costs the same: reading its weights takes {curve.read_us:.4g} us."
        )
    table = compact_table("tokens in a slot", "us")
    for tokens in _SHOWN_TOKENS:
        table.add_row(str(tokens), f"{float(curve.slot_us(tokens)):.2f}")
    console.print(table, soft_wrap=False)
    console.print(f"Written to {out}.", markup=False)
