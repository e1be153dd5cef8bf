"""``eplb calibrate``: fit a cost curve to this machine's expert kernel, or to a measurement table."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from eplb_core.atomic_write import check_output
from eplb_core.cost.curve import PHASES, CostCurve, curve_document, write_curves
from eplb_core.cost.fit import CurveFitError, curve_from_table, fit_curve
from eplb_core.extras import install_command
from eplb_service.cli.options import (
    JSON,
    RESULTS,
    SEVERAL,
    UserError,
    one_of,
    option,
    takes_options,
    whole_numbers,
)
from eplb_service.cli.output import output_console, print_json, table_of

_PROGRAM = "eplb_lab.calibrate"
_SHOWN_TOKENS = (1, 16, 64, 256, 1024)


@dataclass(frozen=True)
class TimingOptions:
    """Grid of measurements on this machine."""

    SECTION: ClassVar[str] = "Timing this machine's kernel"

    slots: int = option(8, "Experts per rank.", min=1)
    tokens: str = option(
        "1,4,16,32,64,128,256", "Tokens per busy slot to try, separated by commas.", metavar=SEVERAL
    )
    device: str = option("cpu", "Device name in torch: cpu, cuda:0, npu:0.")
    repeats: int = option(7, "Timed calls per grid cell; the shortest time counts.", min=1)
    threads: int | None = option(None, "CPU threads; by default, torch chooses the number.", min=1)

    def curve(self, phase: str, hidden: int, inter: int, dtype: str) -> CostCurve:
        """Time this machine's kernel and return its cost curve. Raises ``UserError`` on failure."""
        task = {"hidden": hidden, "inter": inter, "dtype": dtype, **vars(self)}
        task["tokens"] = whole_numbers("--tokens", self.tokens)
        console = Console(stderr=True, highlight=False)
        with console.status(f"timing experts of {hidden} x {inter} on {self.device}"):
            cells = list(_measured(task))
        source = f"calibrated: {self.device}, hidden_size {hidden}, inter_size {inter}, {dtype}, {self.slots} slots"
        columns = ([cell[name] for cell in cells] for name in ("busy", "tokens", "us"))
        try:
            return fit_curve(*columns, phase=phase, source=source)
        except CurveFitError as error:
            raise UserError(
                f"{error}; leave the device idle during the measurement, or increase --repeats"
            ) from error


@dataclass(frozen=True)
class TableOptions:
    """Table of measurements, and the selection of its rows."""

    SECTION: ClassVar[str] = "From a measurement table"

    table: Path | None = option(
        None,
        "Parquet table of MoE kernel times (as in aiconfigurator-core), used instead of timing this machine.",
    )
    experts: int | None = option(
        None, "Number of experts in the layer, if the table contains several.", min=1
    )
    top_k: int | None = option(
        None, "Number of experts that a token chooses, if the table contains several.", min=1
    )
    kernel: str | None = option(None, "Name of the kernel (kernel_source), if the table contains several.")


@takes_options()
def calibrate(
    timing: TimingOptions,
    measured: TableOptions,
    hidden: int | None = option(None, "Hidden size of the model.", min=1),
    inter: int | None = option(None, "Intermediate size of one expert.", min=1),
    dtype: str | None = option(
        None, "Number format: float32, bfloat16 or float16, or a name from the --table; by default float32."
    ),
    phase: str = option("any", f"Phase that the curve applies to: {', '.join(PHASES)}."),
    out: Path = option(help="Write the curve to this .json file.", section=RESULTS),
    json: bool = JSON,
) -> None:
    """Fit a cost curve: the time that a rank's experts take for the tokens in each of its slots.

    Without --table, the command times this machine's expert kernel on a grid of busy slots and tokens; do this before
    serving. With --table, it fits published measurements. Every fourth measurement is held out. A curve that does not
    predict the held-out ones is rejected and not written.
    """
    check_output(out, (".json",))
    one_of("--phase is", phase, PHASES)
    if measured.table is not None:
        curve = curve_from_table(
            measured.table,
            phase,
            hidden_size=hidden,
            inter_size=inter,
            num_experts=measured.experts,
            topk=measured.top_k,
            moe_dtype=dtype,
            kernel_source=measured.kernel,
        )
    elif hidden is None or inter is None:
        raise UserError(
            "give --hidden and --inter of the model's experts, or a measurement table with --table"
        )
    else:
        curve = timing.curve(phase, hidden, inter, dtype or "float32")
    write_curves(out, [curve])
    if json:
        print_json(curve_document(curve))
    else:
        _print(output_console(), curve, out)


def _measured(task: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Time the grid in a separate process, because this package does not need torch, and yield one cell at a time."""
    command = [sys.executable, "-m", _PROGRAM, json_module.dumps(task)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        if "No module named 'torch'" in lines[-1]:
            raise UserError(f"timing experts needs torch: {install_command('model', 'eplb-lab')}")
        raise UserError(f"timing the experts failed: {lines[-1]}")
    for line in process.stdout.splitlines():
        yield json_module.loads(line)


def _print(console: Console, curve: CostCurve, out: Path) -> None:
    console.print(str(curve), style="bold")
    console.print(f"from {curve.source}; {curve.fit}")
    columns = {
        "tokens per slot": lambda tokens: tokens,
        "us": lambda tokens: f"{float(curve.slot_us(tokens)):.2f}",
    }
    console.print(table_of(_SHOWN_TOKENS, columns), soft_wrap=False)
    console.print(f"Written to {out}.")
