"""``eplb trace``: look at heat traces of any format, record, convert and cut them, and make some up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from eplb_service.cli.help_text import HelpCommand, HelpGroup
from eplb_service.cli.options import JSON, UserError, one_of, option, takes_options
from eplb_service.cli.output import compact_table, output_console, print_json, progress_bar
from eplb_service.cli.trace_options import TRACE, ReadingOptions
from eplb_service.cli.trace_record import record
from eplb_service.heat.synthetic import KINDS, synthetic_heat
from eplb_service.io.containers import check_fits_memory
from eplb_service.io.copy_trace import Cut, check_trace_output, copy_trace
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.trace import ArrayTrace, Trace, TraceFacts
from eplb_service.io.trace_statistics import TraceStatistics, statistics
from eplb_service.placement import mean_par

trace = typer.Typer(
    name="trace",
    cls=HelpGroup,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Look at heat traces of any format, record, convert and cut them, make some up.",
)
trace.command(cls=HelpCommand)(record)

_OUT = option(help="Trace to write: .zarr (all that is known), .npz, .npy, .csv or .parquet (the heat).")
_WORST_LAYERS = 5
_SAMPLED_STEPS = 1024
_SYNTHESIS_BYTES = 48
"""Memory that one made-up count takes on its way."""


@trace.command(cls=HelpCommand)
@takes_options()
def info(reading: ReadingOptions, path: Path = TRACE, json: bool = JSON) -> None:
    """Show what a trace is: format, shape, steps, and model and topology where recorded."""
    opened = open_trace(path, reading.reading())
    document = _facts(opened)
    if json:
        print_json(document)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in document.items():
        table.add_row(name.replace("_", " "), _shown(value))
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
    """Measure skew, drift between windows, and the PAR of experts in order, layer by layer."""
    opened = open_trace(path, reading.reading())
    with naming(path):
        found = statistics(opened, window, ranks)
    if json:
        print_json({**_facts(opened), **_statistics_document(found)})
        return
    console = output_console()
    console.print(
        f"{opened.steps} steps x {opened.layers} layers x {opened.experts} experts ({opened.facts.origin})"
    )
    console.print(_statistics_table(found), soft_wrap=False)
    console.print(
        "hottest: its tokens over an expert's mean; top 10%: share of the hottest tenth of the experts."
    )
    console.print(
        f"drift: total variation between windows of {window} steps; sampling: what token sampling alone makes of it."
        if found.drift_L is not None
        else f"drift: not known, the trace has no two windows of {window} steps; use a shorter --window."
    )
    if found.par_L is not None:
        console.print(
            f"PAR: hottest over mean rank in each step, experts in order on {ranks} ranks; "
            "floor: what sampling leaves."
        )
    if not found.choices_L.any():
        console.print("All counts are zero: there is nothing to balance in this trace.")
    if found.par_served_L is not None:
        console.print("as served: the PAR that the ranks measured when it was recorded.")


@trace.command(cls=HelpCommand)
@takes_options()
def convert(reading: ReadingOptions, path: Path = TRACE, out: Path = _OUT, json: bool = JSON) -> None:
    """Copy a trace into another format, in memory bounded by a batch of steps where the format allows."""
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, Cut(), json)


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
    cut = Cut(*_bounds("--steps", steps), *_bounds("--layers", layers))
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, cut, json)


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
    """Make up a trace: popularity stays, drifts, alternates between two domains, or jumps in bursts."""
    check_trace_output(out)
    check_fits_memory(steps * layers * experts * _SYNTHESIS_BYTES)
    heat_TLE = synthetic_heat(
        one_of("--kind names", kind, KINDS), steps, layers, experts, tokens, top_k, seed
    )
    facts = TraceFacts(origin=f"synthetic, {kind}, seed {seed}", top_k=top_k)
    _copy(ArrayTrace(heat_TLE, facts, np.full(steps, tokens, dtype=np.int64)), out, out, Cut(), json)


def _copy(opened: Trace, path: Path, out: Path, cut: Cut, json: bool) -> None:
    check_trace_output(out)
    last = opened.steps if cut.last_step is None else min(cut.last_step, opened.steps)
    columns = MofNCompleteColumn(), TimeRemainingColumn()
    with naming(path), progress_bar("steps", max(0, last - cut.first_step), *columns) as update:
        steps, layers, experts = copy_trace(opened, out, cut, lambda done: update(completed=done))
    if json:
        print_json({"out": out, "steps": steps, "layers": layers, "experts": experts})
    else:
        typer.echo(f"{out}: {steps} steps x {layers} layers x {experts} experts")


def _bounds(name: str, text: str) -> tuple[int, int | None]:
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise UserError(f"{name} is {text!r}; expected FIRST:LAST in whole numbers, such as 0:500 or 500:")
    return int(first or 0), int(last) if last else None


def _facts(opened: Trace) -> dict[str, Any]:
    steps, layers, experts = opened.shape
    numbers = opened.step_numbers(0, 1), opened.step_numbers(steps - 1, steps)
    facts = opened.facts
    return {
        "origin": facts.origin,
        "steps": steps,
        "layers": layers,
        "experts": experts,
        "first_step": int(numbers[0][0]),
        "last_step": int(numbers[1][0]),
        "model": facts.model,
        "ranks": facts.ranks or None,
        "slots": facts.slots or None,
        "tokens_per_step": _tokens_per_step(opened),
        "top_k": facts.top_k or None,
        "bytes_per_expert": facts.bytes_per_expert or None,
        "nodes": list(facts.nodes_R),
        "layer_numbers": list(facts.layer_numbers),
        "phases": [phase for phase in facts.phases if phase != "unknown"],
        "batching": facts.batching,
        "counted_by": _counted_by(opened),
    }


def _tokens_per_step(opened: Trace) -> float | None:
    """Mean over the first steps; ``None`` where tokens were not recorded."""
    tokens_T = opened.tokens(0, min(opened.steps, _SAMPLED_STEPS))
    return None if tokens_T is None else round(float(tokens_T.mean()), 1)


def _shown(value: object) -> str:
    """A fact for people: lists with commas between."""
    if value in ("", [], None):
        return "not recorded"
    return ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def _counted_by(opened: Trace) -> list[str]:
    by_slot = opened.served_loads(0, 1) is not None
    sources = ["source rank"] if opened.source_rows(0, 1) is not None else []
    return ["slot" if by_slot else "expert", *sources]


def _statistics_document(found: TraceStatistics) -> dict[str, Any]:
    document: dict[str, Any] = {
        "window_steps": found.window,
        "choices_per_step": found.choices_L,
        "hottest_over_mean": found.hottest_L,
        "share_of_hottest_tenth": found.top_tenth_L,
        "drift": found.drift_L,
        "drift_by_sampling": found.drift_noise_L,
    }
    if found.par_L is not None:
        document |= {"par_in_order": found.par_L, "noise_floor": found.floor_L}
    if found.par_served_L is not None:
        document["par_served"] = found.par_served_L
    return document


def _statistics_table(found: TraceStatistics) -> Table:
    """The mean over layers, then the layers that are worst."""
    columns = {
        "choices/step": (found.choices_L, "{:.0f}"),
        "hottest": (found.hottest_L, "{:.2f}x"),
        "top 10%": (found.top_tenth_L, "{:.0%}"),
    }
    if found.drift_L is not None and found.drift_noise_L is not None:
        columns |= {"drift": (found.drift_L, "{:.3f}"), "sampling": (found.drift_noise_L, "{:.3f}")}
    if found.par_L is not None and found.floor_L is not None:
        columns |= {"PAR": (found.par_L, "{:.3f}"), "floor": (found.floor_L, "{:.3f}")}
    if found.par_served_L is not None:
        columns["as served"] = (found.par_served_L, "{:.3f}")
    table = compact_table("layer", *columns)
    means = [_cell(text, float(mean_par(values_L))) for values_L, text in columns.values()]
    table.add_row(f"all {found.choices_L.size}", *means, style="bold", end_section=True)
    worst_L = found.hottest_L if found.par_L is None else found.par_L
    for layer in np.argsort(-worst_L, kind="stable")[:_WORST_LAYERS]:
        table.add_row(str(layer), *[_cell(text, values_L[layer]) for values_L, text in columns.values()])
    return table


def _cell(text: str, value: float) -> str:
    return "-" if np.isnan(value) else text.format(value)
