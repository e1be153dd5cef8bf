"""Copy a trace, or a slice of one, to another format.

Copies to the native format and to tables keep only one batch of steps in memory at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from eplb_core.atomic_write import OutputError, check_output
from eplb_core.heat.window import Counts, HeatError
from eplb_service.io.formats.tables import PARQUET, require_parquet, write_table
from eplb_service.io.formats.tables import SUFFIXES as TABLES
from eplb_service.io.native import BATCH_STEPS, SUFFIX, StoredTrace, TraceWriter
from eplb_service.io.trace import Trace, numbered

SUFFIXES = (SUFFIX, ".npz", ".npy", *TABLES)
"""Suffixes of the formats that can be written. Only the native format stores more than the heat."""
Bounds: TypeAlias = tuple[int, int | None]
"""Start and end (exclusive) of a range. An end of ``None`` means the end of the trace."""
ALL: Bounds = 0, None
"""The range of all steps or layers."""


def check_trace_output(path: Path) -> None:
    """Raise ``OutputError`` if a trace cannot be written to ``path``, or if a native trace already exists there."""
    if path.suffix == SUFFIX and path.exists():
        raise OutputError(f"{path}: already exists; choose another name, or remove it first")
    check_output(path, SUFFIXES)
    try:
        if path.suffix == PARQUET:
            require_parquet()
    except HeatError as error:
        raise OutputError(f"{path}: {error}") from error


def copy_trace(
    trace: Trace,
    out: Path,
    steps: Bounds = ALL,
    layers: Bounds = ALL,
    on_steps: Callable[[int], object] | None = None,
) -> tuple[int, int, int]:
    """Write a trace, or a slice of it, to a file or folder. A failed copy leaves nothing behind.

    A native copy keeps everything in the trace. Numpy files and tables keep the heat by logical expert.

    Parameters
    ----------
    trace
        Trace to copy.
    out
        File or folder to write. Its suffix selects the format.
    steps
        Range of steps to copy.
    layers
        Range of layers to copy.
    on_steps
        Called after each batch with the number of steps copied so far.

    Returns
    -------
    tuple
        Number of steps, layers and experts in the copy.

    Raises
    ------
    OutputError
        If the copy cannot be written.
    HeatError
        If the trace is damaged or the slice is empty.
    """
    copied_steps = range(trace.steps)[slice(*steps)]
    copied_layers = range(trace.layers)[slice(*layers)]
    if not copied_steps or not copied_layers:
        raise HeatError(
            f"the slice of steps {_text(steps)} and layers {_text(layers)} is empty; "
            f"the trace has {trace.steps} steps and {trace.layers} layers"
        )
    layer_slice = slice(copied_layers.start, copied_layers.stop)

    def batches() -> Iterator[tuple[int, int]]:
        for first in range(copied_steps.start, copied_steps.stop, BATCH_STEPS):
            last = min(copied_steps.stop, first + BATCH_STEPS)
            yield first, last
            if on_steps is not None:
                on_steps(last - copied_steps.start)

    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.resolve().parent, prefix=f".{out.name}."))
        if out.suffix == SUFFIX:
            _write_native(trace, scratch / out.name, layer_slice, batches())
        else:
            heat_batches = (trace.heat(first, last)[:, layer_slice] for first, last in batches())
            layer_numbers = (trace.facts.layer_numbers or range(trace.layers))[layer_slice]
            _write_heat(scratch / out.name, heat_batches, len(copied_steps), layer_numbers)
        (scratch / out.name).replace(out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return len(copied_steps), len(copied_layers), trace.experts


def _text(bounds: Bounds) -> str:
    """Format a range as on the command line."""
    return f"{bounds[0]}:{'' if bounds[1] is None else bounds[1]}"


def _write_heat(out: Path, heat_batches: Iterator[Counts], steps: int, layer_numbers: Sequence[int]) -> None:
    """Write the heat by logical expert, preserving the layer numbers.

    An ``.npy`` file cannot store layer numbers. Instead, it gets rows of zeros for the dense layers, as in the engines'
    files.
    """
    if out.suffix in TABLES:
        write_table(out, heat_batches, steps, layer_numbers)
        return
    heat_TLE = np.concatenate(list(heat_batches))
    if out.suffix == ".npz":
        np.savez_compressed(out, heat=heat_TLE, layer_numbers=np.array(layer_numbers))
        return
    by_number_TLE = np.zeros((steps, layer_numbers[-1] + 1, heat_TLE.shape[2]), dtype=heat_TLE.dtype)
    by_number_TLE[:, list(layer_numbers)] = heat_TLE
    np.save(out, by_number_TLE)


def _write_native(trace: Trace, out: Path, layers: slice, batches: Iterator[tuple[int, int]]) -> None:
    """Write a native trace, with the placements if ``trace`` is native as well."""
    copied_layers = range(trace.layers)[layers]
    facts = replace(
        trace.facts, layer_numbers=numbered((trace.facts.layer_numbers or range(trace.layers))[layers])
    )
    placements = trace.placements if isinstance(trace, StoredTrace) else {}
    with TraceWriter(out, facts, len(copied_layers), trace.experts) as writer:
        for (layer, epoch), phy2log_RS in placements.items():
            if layer in copied_layers:
                writer.place(layer - copied_layers.start, epoch, phy2log_RS)
        for first, last in batches:
            if isinstance(trace, StoredTrace) and trace.by_slot:
                counts, epoch_TL = trace.slot_heat(first, last)
                epoch_TL = epoch_TL[:, layers]
            else:
                counts = trace.heat(first, last)
                epoch_TL = None
            source_TRLE = trace.source_rows(first, last)
            writer.append(
                counts[:, layers],
                epoch_TL,
                step_T=trace.step_numbers(first, last),
                tokens_T=trace.tokens(first, last),
                phase_T=trace.phase_numbers(first, last),
                source_TRLE=None if source_TRLE is None else source_TRLE[:, :, layers],
            )
