"""Copies a trace, or a slice of one, into another format, in memory bounded by a batch of steps."""

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
"""Formats of a copy: the native folder, or numpy's files and tables of its heat alone."""
Bounds: TypeAlias = tuple[int, int | None]
"""First and last (not included); ``None`` is the trace's end."""
ALL: Bounds = 0, None


def check_trace_output(path: Path) -> None:
    """Raise ``OutputError`` where no trace can be written to ``path``, or a folder exists there already."""
    if path.suffix == SUFFIX and path.exists():
        raise OutputError(f"{path}: exists; choose another name, or remove it first")
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
    """Write ``trace``, or some ``steps`` and ``layers`` of it, to ``out`` whole or not at all.

    A native copy keeps all that the trace knows; numpy's files and tables keep the heat by logical expert. ``on_steps``
    is called with the number of steps copied. Returns the shape written. Raises ``OutputError``, or ``HeatError`` where
    the trace is damaged or the slice empty.
    """
    kept, numbers = range(trace.steps)[slice(*steps)], range(trace.layers)[slice(*layers)]
    if not kept or not numbers:
        raise HeatError(
            f"the slice of steps {_text(steps)} and layers {_text(layers)} is empty; "
            f"the trace has {trace.steps} steps and {trace.layers} layers"
        )
    chosen = slice(numbers.start, numbers.stop)

    def batches() -> Iterator[tuple[int, int]]:
        for first in range(kept.start, kept.stop, BATCH_STEPS):
            last = min(kept.stop, first + BATCH_STEPS)
            yield first, last
            if on_steps is not None:
                on_steps(last - kept.start)

    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.resolve().parent, prefix=f".{out.name}."))
        if out.suffix == SUFFIX:
            _to_store(trace, scratch / out.name, chosen, batches())
        else:
            parts = (trace.heat(first, last)[:, chosen] for first, last in batches())
            _write_heat(
                scratch / out.name,
                parts,
                len(kept),
                (trace.facts.layer_numbers or range(trace.layers))[chosen],
            )
        (scratch / out.name).replace(out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return len(kept), len(numbers), trace.experts


def _text(bounds: Bounds) -> str:
    return f"{bounds[0]}:{'' if bounds[1] is None else bounds[1]}"


def _write_heat(out: Path, parts: Iterator[Counts], steps: int, layer_numbers: Sequence[int]) -> None:
    """Write heat by logical expert, so that it is read back with the layers' numbers.

    An ``.npy`` has no place for these: its dense layers get rows of zeros, as engines write them.
    """
    if out.suffix in TABLES:
        write_table(out, parts, steps, layer_numbers)
        return
    heat_TLE = np.concatenate(list(parts))
    if out.suffix == ".npz":
        np.savez_compressed(out, heat=heat_TLE, layer_numbers=np.array(layer_numbers))
        return
    by_number_TLE = np.zeros((steps, layer_numbers[-1] + 1, heat_TLE.shape[2]), dtype=heat_TLE.dtype)
    by_number_TLE[:, list(layer_numbers)] = heat_TLE
    np.save(out, by_number_TLE)


def _to_store(trace: Trace, out: Path, layers: slice, batches: Iterator[tuple[int, int]]) -> None:
    kept = range(trace.layers)[layers]
    facts = replace(
        trace.facts, layer_numbers=numbered((trace.facts.layer_numbers or range(trace.layers))[layers])
    )
    placements = trace.placements if isinstance(trace, StoredTrace) else {}
    with TraceWriter(out, facts, len(kept), trace.experts) as writer:
        for (layer, epoch), phy2log_RS in placements.items():
            if layer in kept:
                writer.place(layer - kept.start, epoch, phy2log_RS)
        for first, last in batches:
            if isinstance(trace, StoredTrace) and trace.by_slot:
                counts, epoch_TL = trace.slot_heat(first, last)
                epoch_TL = epoch_TL[:, layers]
            else:
                counts, epoch_TL = trace.heat(first, last), None
            source_TRLE = trace.source_rows(first, last)
            writer.append(
                counts[:, layers],
                epoch_TL,
                step_T=trace.step_numbers(first, last),
                tokens_T=trace.tokens(first, last),
                phase_T=trace.phase_numbers(first, last),
                source_TRLE=None if source_TRLE is None else source_TRLE[:, :, layers],
            )
