"""``eplb trace``: look at heat traces of any format, record, convert and cut them, and make some up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from eplb_service.cli.options import JSON, HelpCommand, UserError, one_of, option, takes_options
from eplb_service.cli.output import layers_table, output_console, print_json, progress_bar
from eplb_service.cli.trace_options import TRACE, ReadingOptions
from eplb_service.cli.trace_record import record
from eplb_service.io.containers import check_fits_memory
from eplb_service.io.copy_trace import ALL, Bounds, check_trace_output, copy_trace
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.synthetic import KINDS, synthetic_heat
from eplb_service.io.trace import ArrayTrace, Trace, TraceFacts
from eplb_service.io.trace_statistics import TraceStatistics, statistics

trace = typer.Typer(
    name="trace",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Look at heat traces of any format, record, convert and cut them, make some up.",
)
trace.command(cls=HelpCommand)(record)

_OUT = option(help="Trace to write: .zarr (all that is known), .npz, .npy, .csv or .parquet (the heat).")
_SAMPLED_STEPS = 1024
_SYNTHESIS_BYTES = 48
"""Memory that one made-up count takes on its way."""


@trace.command(cls=HelpCommand)
@takes_options()
def info(reading: ReadingOptions, path: Path = TRACE, json: bool = JSON) -> None:
    """Show what a trace is: format, shape, model and topology."""
    document = _facts(open_trace(path, reading.reading()))
    if json:
        print_json(document)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in document.items():
        if value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            table.add_row(name.replace("_", " "), ", ".join(map(str, parts)))
    output_console().print(table)


@trace.command(cls=HelpCommand)
@takes_options()
def stats(
    reading: ReadingOptions,
    path: Path = TRACE,
    ranks: int | None = option(None, "Also PAR of experts in order on so many ranks.", min=1),
    window: int = option(256, "Steps of the windows that drift is measured between.", min=1),
    json: bool = JSON,
) -> None:
    """Measure skew, drift and the PAR of experts in order, by layer."""
    opened = open_trace(path, reading.reading())
    with naming(path):
        found = statistics(opened, window, ranks)
    if json:
        print_json({**_facts(opened), **vars(found)})
        return
    console = output_console()
    console.print(
        f"{opened.steps} steps x {opened.layers} layers x {opened.experts} experts ({opened.facts.origin})"
    )
    console.print(_statistics_table(found), soft_wrap=False)
    console.print(
        "hottest: its tokens over an expert's mean; top 10%: share of the hottest tenth of the experts; drift: total "
        f"variation between windows of {window} steps, and what sampling alone makes of it; PAR: hottest over mean "
        "rank in each step, experts in order, and the floor that sampling leaves."
    )
    if not found.choices_L.any():
        console.print("All counts are zero: there is nothing to balance in this trace.")


@trace.command(cls=HelpCommand)
@takes_options()
def convert(reading: ReadingOptions, path: Path = TRACE, out: Path = _OUT, json: bool = JSON) -> None:
    """Copy a trace into another format, step by step where that can be."""
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, json)


@trace.command(cls=HelpCommand)
@takes_options()
def slice(
    reading: ReadingOptions,
    path: Path = TRACE,
    out: Path = _OUT,
    steps: str = option(":", "FIRST:LAST, the last not included; either may be left out."),
    layers: str = option(":", "FIRST:LAST, as for --steps."),
    json: bool = JSON,
) -> None:
    """Copy some steps and layers of a trace."""
    bounds = _bounds("--steps", steps), _bounds("--layers", layers)
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, json, *bounds)


@trace.command(cls=HelpCommand)
@takes_options()
def synth(
    out: Path = _OUT,
    kind: str = option("drift", f"How popularity moves: {', '.join(KINDS)}."),
    steps: int = option(2048, "Steps.", min=1),
    layers: int = option(8, "MoE layers.", min=1),
    experts: int = option(64, "Logical experts per layer.", min=1),
    tokens: int = option(4096, "Tokens of a step.", min=1),
    top_k: int = option(8, "Experts that a token chooses.", min=1),
    seed: int = option(0, "The same seed makes the same trace.", min=0),
    json: bool = JSON,
) -> None:
    """Make up a trace: static, drifting, phased or bursty heat."""
    check_trace_output(out)
    check_fits_memory(steps * layers * experts * _SYNTHESIS_BYTES)
    heat_TLE = synthetic_heat(
        one_of("--kind names", kind, KINDS), steps, layers, experts, tokens, top_k, seed
    )
    facts = TraceFacts(origin=f"synthetic, {kind}, seed {seed}", top_k=top_k)
    _copy(ArrayTrace(heat_TLE, facts, np.full(steps, tokens, dtype=np.int64)), out, out, json)


def _copy(
    opened: Trace,
    path: Path,
    out: Path,
    json: bool,
    kept: Bounds = ALL,
    layers: Bounds = ALL,
) -> None:
    check_trace_output(out)
    count = max(0, min(kept[1] or opened.steps, opened.steps) - kept[0])
    columns = MofNCompleteColumn(), TimeRemainingColumn()
    with naming(path), progress_bar("steps", count, *columns) as update:
        steps, width, experts = copy_trace(opened, out, kept, layers, lambda done: update(completed=done))
    if json:
        print_json({"out": out, "steps": steps, "layers": width, "experts": experts})
    else:
        typer.echo(f"{out}: {steps} steps x {width} layers x {experts} experts")


def _bounds(name: str, text: str) -> Bounds:
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise UserError(f"{name} is {text!r}; expected FIRST:LAST in whole numbers, such as 0:500 or 500:")
    return int(first or 0), int(last) if last else None


def _facts(opened: Trace) -> dict[str, Any]:
    """Shape, and what the trace states beside its heat."""
    steps, layers, experts = opened.shape
    tokens_T = opened.tokens(0, min(steps, _SAMPLED_STEPS))
    counted_by = ["expert" if opened.served_loads(0, 1) is None else "slot"]
    counted_by += [] if opened.source_rows(0, 1) is None else ["source rank"]
    return {
        "steps": steps,
        "layers": layers,
        "experts": experts,
        "first_step": opened.step_numbers(0, 1)[0],
        "last_step": opened.step_numbers(steps - 1, steps)[0],
        "tokens_per_step": None if tokens_T is None else round(float(tokens_T.mean()), 1),
        "counted_by": counted_by,
        **{name: value or None for name, value in vars(opened.facts).items()},
    }


def _statistics_table(found: TraceStatistics) -> Table:
    columns = {
        "choices/step": (found.choices_L, ".0f"),
        "hottest": (found.hottest_L, ".2f"),
        "top 10%": (found.top_tenth_L, ".0%"),
        "drift": (found.drift_L, ".3f"),
        "sampling": (found.drift_noise_L, ".3f"),
        "PAR": (found.par_L, ".3f"),
        "floor": (found.floor_L, ".3f"),
        "as served": (found.par_served_L, ".3f"),
    }
    known = {name: (values_L, form) for name, (values_L, form) in columns.items() if values_L is not None}
    return layers_table(known, found.hottest_L if found.par_L is None else found.par_L)
