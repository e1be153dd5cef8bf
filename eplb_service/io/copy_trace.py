"""Copies a trace, or a slice of one, into another format, in memory bounded by a batch of steps."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eplb_service.atomic_write import OutputError
from eplb_service.heat.window import HeatError
from eplb_service.io.formats.tables import check_pyarrow, write_table
from eplb_service.io.native import BATCH_STEPS, SUFFIX, StoredTrace, TraceWriter, check_zarr
from eplb_service.io.trace import Trace, numbered

SUFFIXES = (SUFFIX, ".npz", ".npy", ".csv", ".parquet")
"""Formats of a copy: the native folder, or numpy's files and tables of its heat alone."""


@dataclass(frozen=True)
class Cut:
    """The steps and layers to copy; an end of ``None`` is that of the trace."""

    first_step: int = 0
    last_step: int | None = None
    first_layer: int = 0
    last_layer: int | None = None

    def ranges(self, trace: Trace) -> tuple[range, slice]:
        """Steps and layers of ``trace``; raises ``HeatError`` where it has none of them."""
        last_step = trace.steps if self.last_step is None else min(self.last_step, trace.steps)
        last_layer = trace.layers if self.last_layer is None else min(self.last_layer, trace.layers)
        if not 0 <= self.first_step < last_step or not 0 <= self.first_layer < last_layer:
            raise HeatError(
                f"the slice of steps {_range(self.first_step, self.last_step)} and layers "
                f"{_range(self.first_layer, self.last_layer)} is empty; "
                f"the trace has {trace.steps} steps and {trace.layers} layers"
            )
        return range(self.first_step, last_step), slice(self.first_layer, last_layer)


def _range(first: int, last: int | None) -> str:
    return f"{first}:{'' if last is None else last}"


def check_trace_output(path: Path) -> None:
    """Raise ``OutputError`` where no trace can be written to ``path``, or something exists there already."""
    if path.suffix not in SUFFIXES:
        raise OutputError(f"{path}: the name must end in {' or '.join(SUFFIXES)}, which says the format")
    if path.exists() and (path.suffix == SUFFIX or not path.is_file()):
        raise OutputError(f"{path}: exists; choose another name, or remove it first")
    try:
        if path.suffix == ".parquet":
            check_pyarrow()
        elif path.suffix == SUFFIX:
            check_zarr()
    except HeatError as error:
        raise OutputError(f"{path}: {error}") from error
    if not path.resolve().parent.is_dir():
        raise OutputError(f"{path}: the folder {path.resolve().parent} does not exist; create it first")


def copy_trace(
    trace: Trace, out: Path, cut: Cut | None = None, on_steps: Callable[[int], object] | None = None
) -> tuple[int, int, int]:
    """Write ``trace`` to ``out`` whole or not at all; returns the shape written.

    A native copy keeps all that the trace knows; numpy's files and tables keep the heat by logical expert. ``on_steps``
    is called with the number of steps copied. Raises ``OutputError``, or ``HeatError`` where the trace is damaged.
    """
    steps, layers = (cut or Cut()).ranges(trace)

    def batches() -> Iterator[tuple[int, int]]:
        for first in range(steps.start, steps.stop, BATCH_STEPS):
            last = min(steps.stop, first + BATCH_STEPS)
            yield first, last
            if on_steps is not None:
                on_steps(last - steps.start)

    write = {".npy": _to_numpy, ".npz": _to_numpy, ".csv": _to_table, ".parquet": _to_table}
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.resolve().parent, prefix=f".{out.name}."))
        write.get(out.suffix, _to_store)(trace, scratch / out.name, steps, layers, batches())
        (scratch / out.name).replace(out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return len(steps), layers.stop - layers.start, trace.experts


_Batches = Iterator[tuple[int, int]]


def _to_numpy(trace: Trace, out: Path, steps: range, layers: slice, batches: _Batches) -> None:
    if out.suffix == ".npz":
        heat_TLE = np.concatenate([trace.heat(first, last)[:, layers] for first, last in batches])
        np.savez_compressed(out, heat=heat_TLE)
        return
    shape = (len(steps), layers.stop - layers.start, trace.experts)
    dtype = trace.heat(steps.start, steps.start + 1).dtype
    mapped = np.lib.format.open_memmap(out, mode="w+", dtype=dtype, shape=shape)
    for first, last in batches:
        mapped[first - steps.start : last - steps.start] = trace.heat(first, last)[:, layers]
    mapped.flush()


def _to_table(trace: Trace, out: Path, steps: range, layers: slice, batches: _Batches) -> None:
    parts = ((first - steps.start, trace.heat(first, last)[:, layers]) for first, last in batches)
    write_table(out, parts, len(steps), whole=trace.heat(0, 1).dtype.kind in "iu")


def _to_store(trace: Trace, out: Path, _steps: range, layers: slice, batches: _Batches) -> None:
    by_slot = isinstance(trace, StoredTrace) and trace.by_slot
    sources = trace.source_rows(0, 1) is not None
    facts = replace(
        trace.facts, layer_numbers=numbered((trace.facts.layer_numbers or range(trace.layers))[layers])
    )
    width = layers.stop - layers.start
    with TraceWriter(out, facts, width, trace.experts, by_slot=by_slot, sources=sources) as writer:
        if isinstance(trace, StoredTrace):
            for (layer, epoch), phy2log_RS in trace.placements.items():
                if layers.start <= layer < layers.stop:
                    writer.place(layer - layers.start, epoch, phy2log_RS)
        for first, last in batches:
            source_TRLE, epoch_TL = trace.source_rows(first, last), None
            if isinstance(trace, StoredTrace) and by_slot:
                counts, epoch_TL = trace.slot_heat(first, last)
                epoch_TL = epoch_TL[:, layers]
            else:
                counts = trace.heat(first, last)
            writer.append(
                counts[:, layers],
                epoch_TL,
                step_T=trace.step_numbers(first, last),
                tokens_T=trace.tokens(first, last),
                phase_T=trace.phase_numbers(first, last),
                source_TRLE=None if source_TRLE is None else source_TRLE[:, :, layers],
            )
