"""``eplb trace``: inspect, record, convert, slice and synthesise heat traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from eplb_service.cli.file_options import TRACE, ReadingOptions
from eplb_service.cli.options import JSON, HelpCommand, UserError, one_of, option, takes_options
from eplb_service.cli.output import layers_table, output_console, print_json, progress_bar
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
    help="Inspect, record, convert, slice, or synthesise heat traces.",
)
trace.command(cls=HelpCommand)(record)

_OUT = option(help="Trace to write: .zarr (all data), or .npz, .npy, .csv or .parquet (only the heat).")
_SAMPLED_STEPS = 1024
_SYNTHESIS_BYTES = 48
"""Peak memory per synthetic count during generation, in bytes."""


@trace.command(cls=HelpCommand)
@takes_options()
def info(reading: ReadingOptions, path: Path = TRACE, json: bool = JSON) -> None:
    """Show the format, shape, model and topology of a trace."""
    document = _facts(open_trace(path, reading.reading()))
    if json:
        print_json(document)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in document.items():
        if value is not None:
            items = value if isinstance(value, (list, tuple)) else [value]
            table.add_row(name.replace("_", " "), ", ".join(map(str, items)))
    output_console().print(table)


@trace.command(cls=HelpCommand)
@takes_options()
def stats(
    reading: ReadingOptions,
    path: Path = TRACE,
    ranks: int | None = option(
        None, "Also show the PAR of the experts in order on this number of ranks.", min=1
    ),
    window: int = option(256, "Steps per window; drift is measured between windows.", min=1),
    json: bool = JSON,
) -> None:
    """Measure the skew, the drift, and the PAR of the experts in order, by layer."""
    opened = open_trace(path, reading.reading())
    with naming(path):
        measured = statistics(opened, window, ranks)
    if json:
        print_json({**_facts(opened), **vars(measured)})
        return
    console = output_console()
    console.print(
        f"{opened.steps} steps x {opened.layers} layers x {opened.experts} experts ({opened.facts.origin})"
    )
    console.print(_statistics_table(measured), soft_wrap=False)
    console.print(
        "hottest: tokens of the hottest expert over the mean per expert; top 10%: share of the hottest tenth of the "
        f"experts; drift: total variation distance between windows of {window} steps, next to the drift that token "
        "sampling causes; PAR: load of the hottest rank over the mean rank load in each step with the experts in "
        "order, next to the floor, the PAR that token sampling gives a perfectly balanced placement."
    )
    if not measured.choices_L.any():
        console.print("All counts are zero, so this trace has nothing to balance.")


@trace.command(cls=HelpCommand)
@takes_options()
def convert(reading: ReadingOptions, path: Path = TRACE, out: Path = _OUT, json: bool = JSON) -> None:
    """Convert a trace to another format, reading it in chunks if its format allows."""
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, json)


@trace.command(cls=HelpCommand)
@takes_options()
def slice(
    reading: ReadingOptions,
    path: Path = TRACE,
    out: Path = _OUT,
    steps: str = option(":", "FIRST:LAST, where LAST is exclusive; either may be omitted."),
    layers: str = option(":", "FIRST:LAST, as for --steps."),
    json: bool = JSON,
) -> None:
    """Copy a range of steps and layers of a trace."""
    step_bounds = _bounds("--steps", steps)
    layer_bounds = _bounds("--layers", layers)
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, json, step_bounds, layer_bounds)


@trace.command(cls=HelpCommand)
@takes_options()
def synth(
    out: Path = _OUT,
    kind: str = option("drift", f"How the popularity of experts changes: {', '.join(KINDS)}."),
    steps: int = option(2048, "Number of steps.", min=1),
    layers: int = option(8, "MoE layers.", min=1),
    experts: int = option(64, "Logical experts per layer.", min=1),
    tokens: int = option(4096, "Tokens per step.", min=1),
    top_k: int = option(8, "Experts that a token chooses.", min=1),
    seed: int = option(0, "Seed; the same seed gives the same trace.", min=0),
    json: bool = JSON,
) -> None:
    """Synthesise a trace with static, drifting, phased or bursty heat."""
    check_trace_output(out)
    check_fits_memory(steps * layers * experts * _SYNTHESIS_BYTES)
    heat_TLE = synthetic_heat(one_of("--kind is", kind, KINDS), steps, layers, experts, tokens, top_k, seed)
    facts = TraceFacts(origin=f"synthetic, {kind}, seed {seed}", top_k=top_k)
    _copy(ArrayTrace(heat_TLE, facts, np.full(steps, tokens, dtype=np.int64)), out, out, json)


def _copy(
    opened: Trace,
    path: Path,
    out: Path,
    json: bool,
    step_bounds: Bounds = ALL,
    layer_bounds: Bounds = ALL,
) -> None:
    """Copy a trace, or a range of it, and print the shape of the result."""
    check_trace_output(out)
    first, end = step_bounds
    count = max(0, min(end or opened.steps, opened.steps) - first)
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    with naming(path), progress_bar("steps", count, *columns) as update:
        steps, layers, experts = copy_trace(
            opened, out, step_bounds, layer_bounds, lambda done: update(completed=done)
        )
    if json:
        print_json({"out": out, "steps": steps, "layers": layers, "experts": experts})
    else:
        typer.echo(f"{out}: {steps} steps x {layers} layers x {experts} experts")


def _bounds(name: str, text: str) -> Bounds:
    first, colon, last = text.partition(":")
    if not colon or not all(bound == "" or bound.isdecimal() for bound in (first, last)):
        raise UserError(f"{name} is {text!r}; expected FIRST:LAST in whole numbers, such as 0:500 or 500:")
    return int(first or 0), int(last) if last else None


def _facts(opened: Trace) -> dict[str, Any]:
    """Return the shape of a trace and all recorded facts, keyed by JSON key."""
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


def _statistics_table(measured: TraceStatistics) -> Table:
    columns = {
        "choices/step": (measured.choices_L, ".0f"),
        "hottest": (measured.hottest_L, ".2f"),
        "top 10%": (measured.top_tenth_L, ".0%"),
        "drift": (measured.drift_L, ".3f"),
        "sampling": (measured.drift_noise_L, ".3f"),
        "PAR": (measured.par_L, ".3f"),
        "floor": (measured.floor_L, ".3f"),
        "as served": (measured.par_served_L, ".3f"),
    }
    available = {name: (values_L, spec) for name, (values_L, spec) in columns.items() if values_L is not None}
    return layers_table(available, measured.hottest_L if measured.par_L is None else measured.par_L)
