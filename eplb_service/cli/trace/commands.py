"""``eplb trace``: look at heat traces of any format, record, convert and cut them, and make some up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eplb_service.cli.errors import UserError
from eplb_service.cli.help_text import HelpCommand, HelpGroup
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.trace import ReadingOptions, TraceArgument
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json
from eplb_service.cli.output.tables import compact_table
from eplb_service.cli.trace.record import record
from eplb_service.heat.synthetic import KINDS, synthetic_heat
from eplb_service.io.containers.numpy_file import check_fits_memory
from eplb_service.io.copy_trace import Cut, check_trace_output, copy_trace
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.trace import ArrayTrace, Trace, TraceFacts
from eplb_service.io.trace_statistics import TraceStatistics, statistics
from eplb_service.placement.par import mean_par

trace = typer.Typer(
    name="trace",
    cls=HelpGroup,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Look at heat traces of any format, record, convert and cut them, make some up.",
)
trace.command(cls=HelpCommand)(record)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Out = Annotated[
    Path,
    typer.Option(help="Trace to write: .zarr (all that is known), .npz, .npy, .csv or .parquet (the heat)."),
]
_WORST_LAYERS = 5
_SAMPLED_STEPS = 1024
_SYNTHESIS_BYTES = 48
"""Memory that one made-up count takes on its way."""


@trace.command(cls=HelpCommand)
@option_groups
def info(
    path: TraceArgument,
    reading: ReadingOptions,
    json: _Json = False,
) -> None:
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
@option_groups
def stats(
    path: TraceArgument,
    reading: ReadingOptions,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Also PAR of experts in order on so many ranks.")
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, help="Steps of the windows that drift is measured between.")
    ] = 256,
    json: _Json = False,
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
@option_groups
def convert(
    path: TraceArgument,
    out: _Out,
    reading: ReadingOptions,
    json: _Json = False,
) -> None:
    """Copy a trace into another format, in memory bounded by a batch of steps where the format allows."""
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, Cut(), json)


@trace.command(cls=HelpCommand)
@option_groups
def slice(
    path: TraceArgument,
    out: _Out,
    reading: ReadingOptions,
    steps: Annotated[
        str, typer.Option(help="FIRST:LAST, the last not included; either may be left out.")
    ] = ":",
    layers: Annotated[str, typer.Option(help="FIRST:LAST, as for --steps.")] = ":",
    json: _Json = False,
) -> None:
    """Copy some steps and layers of a trace."""
    cut = Cut(*_bounds("--steps", steps), *_bounds("--layers", layers))
    opened = open_trace(path, reading.reading())
    _copy(opened, path, out, cut, json)


@trace.command(cls=HelpCommand)
@option_groups
def synth(
    out: _Out,
    kind: Annotated[str, typer.Option(help=f"How popularity moves: {', '.join(KINDS)}.")] = "drift",
    steps: Annotated[int, typer.Option(min=1, help="Steps.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Logical experts per layer.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 4096,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that a token chooses.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same trace.")] = 0,
    json: _Json = False,
) -> None:
    """Make up a trace: popularity stays, drifts, alternates between two domains, or jumps in bursts."""
    if kind not in KINDS:
        raise UserError(f"--kind names {kind!r}; choose one of {', '.join(KINDS)}")
    check_trace_output(out)
    check_fits_memory(steps * layers * experts * _SYNTHESIS_BYTES)
    heat_TLE = synthetic_heat(kind, steps, layers, experts, tokens, top_k, seed)
    facts = TraceFacts(origin=f"synthetic, {kind}, seed {seed}", top_k=top_k)
    _copy(ArrayTrace(heat_TLE, facts, np.full(steps, tokens, dtype=np.int64)), out, out, Cut(), json)


def _copy(opened: Trace, path: Path, out: Path, cut: Cut, json: bool) -> None:
    check_trace_output(out)
    last = opened.steps if cut.last_step is None else min(cut.last_step, opened.steps)
    with naming(path), _progress(last - cut.first_step) as advance:
        steps, layers, experts = copy_trace(opened, out, cut, advance)
    if json:
        print_json({"out": str(out), "steps": steps, "layers": layers, "experts": experts})
    else:
        typer.echo(f"{out}: {steps} steps x {layers} layers x {experts} experts")


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _steps: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("steps", total=max(0, steps))
        yield lambda done: progress.update(task, completed=done)


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
