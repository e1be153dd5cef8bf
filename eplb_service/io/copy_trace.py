"""Copies a trace, or a slice of one, into another format, in memory bounded by a batch of steps."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eplb_service.atomic_write import OutputError, write_atomically
from eplb_service.heat.window import HeatError
from eplb_service.io.formats.csv_file import csv_text, rows_of
from eplb_service.io.formats.parquet_file import check_pyarrow, write_parquet_rows
from eplb_service.io.native import layout as native_layout
from eplb_service.io.native.reader import StoredTrace
from eplb_service.io.native.writer import BATCH_STEPS, TraceWriter
from eplb_service.io.trace import Trace
from eplb_service.placement import Float64

SUFFIXES = (native_layout.SUFFIX, ".npz", ".npy", ".csv", ".parquet")
"""What a trace can be copied into: the native folder, or numpy's files and tables of its heat alone."""


@dataclass(frozen=True)
class Cut:
    """The steps and layers to copy; an end of ``None`` is that of the trace.

    Raises
    ------
    HeatError
        When it is fitted to a trace that has none of them.
    """

    first_step: int = 0
    last_step: int | None = None
    first_layer: int = 0
    last_layer: int | None = None

    def fitted(self, trace: Trace) -> Cut:
        """With the ends of ``trace`` in place."""
        last_step = trace.steps if self.last_step is None else min(self.last_step, trace.steps)
        last_layer = trace.layers if self.last_layer is None else min(self.last_layer, trace.layers)
        if not 0 <= self.first_step < last_step or not 0 <= self.first_layer < last_layer:
            raise HeatError(
                f"the slice of steps {_range(self.first_step, self.last_step)} and layers "
                f"{_range(self.first_layer, self.last_layer)} is empty; "
                f"the trace has {trace.steps} steps and {trace.layers} layers"
            )
        return Cut(self.first_step, last_step, self.first_layer, last_layer)


def _range(first: int, last: int | None) -> str:
    """The range as it was asked for."""
    return f"{first}:{'' if last is None else last}"


def check_trace_output(path: Path) -> None:
    """Raise ``OutputError`` where no trace can be written to ``path``, or something exists there already."""
    if path.suffix not in SUFFIXES:
        raise OutputError(f"{path}: the name must end in {' or '.join(SUFFIXES)}, which says the format")
    if path.exists() and (path.suffix == native_layout.SUFFIX or not path.is_file()):
        raise OutputError(f"{path}: exists; choose another name, or remove it first")
    if path.suffix == ".parquet":
        try:
            check_pyarrow()
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
    fitted = (cut or Cut()).fitted(trace)
    assert fitted.last_step is not None
    assert fitted.last_layer is not None
    layers = slice(fitted.first_layer, fitted.last_layer)
    steps = range(fitted.first_step, fitted.last_step)
    if out.suffix == ".npz":
        heat_TLE = np.concatenate(
            [
                trace.heat(first, min(steps.stop, first + BATCH_STEPS))[:, layers]
                for first in range(steps.start, steps.stop, BATCH_STEPS)
            ]
        )
        buffer = io.BytesIO()
        np.savez_compressed(buffer, heat=heat_TLE)
        write_atomically(out, buffer.getvalue())
    else:
        _in_a_scratch_folder(trace, out, steps, layers, on_steps)
    return len(steps), fitted.last_layer - fitted.first_layer, trace.experts


def _in_a_scratch_folder(
    trace: Trace, out: Path, steps: range, layers: slice, on_steps: Callable[[int], object] | None
) -> None:
    """Copy into a folder beside ``out``, then put it into place in one step."""
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.resolve().parent, prefix=f".{out.name}."))
        made = scratch / out.name
        if out.suffix == ".npy":
            _copy_to_npy(trace, made, steps, layers, on_steps)
        elif out.suffix in (".csv", ".parquet"):
            _copy_to_table(trace, made, steps, layers, on_steps)
        else:
            _copy_to_store(trace, made, steps, layers, on_steps)
        made.replace(out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _copy_to_npy(
    trace: Trace, out: Path, steps: range, layers: slice, on_steps: Callable[[int], object] | None
) -> None:
    shape = (len(steps), layers.stop - layers.start, trace.experts)
    dtype = trace.heat(steps.start, steps.start + 1).dtype
    mapped = np.lib.format.open_memmap(out, mode="w+", dtype=dtype, shape=shape)
    for first in range(steps.start, steps.stop, BATCH_STEPS):
        last = min(steps.stop, first + BATCH_STEPS)
        mapped[first - steps.start : last - steps.start] = trace.heat(first, last)[:, layers]
        if on_steps is not None:
            on_steps(last - steps.start)
    mapped.flush()


def _copy_to_table(
    trace: Trace, out: Path, steps: range, layers: slice, on_steps: Callable[[int], object] | None
) -> None:
    def parts() -> Iterator[Float64]:
        for first in range(steps.start, steps.stop, BATCH_STEPS):
            last = min(steps.stop, first + BATCH_STEPS)
            yield rows_of(trace.heat(first, last)[:, layers], first - steps.start, len(steps))
            if on_steps is not None:
                on_steps(last - steps.start)

    if out.suffix == ".parquet":
        write_parquet_rows(out, parts(), whole=trace.heat(0, 1).dtype.kind in "iu")
        return
    with out.open("w", encoding="utf-8") as file:
        for number, rows in enumerate(parts()):
            file.write(csv_text(rows, headed=number == 0))


def _copy_to_store(
    trace: Trace, out: Path, steps: range, layers: slice, on_steps: Callable[[int], object] | None
) -> None:
    by_slot = isinstance(trace, StoredTrace) and trace.by_slot
    sources = trace.source_rows(0, 1) is not None
    width = layers.stop - layers.start
    facts = replace(trace.facts, layer_numbers=_numbers(trace, layers))
    with TraceWriter(out, facts, width, trace.experts, by_slot=by_slot, sources=sources) as writer:
        if isinstance(trace, StoredTrace):
            for (layer, epoch), phy2log_RS in trace.placements().items():
                if layers.start <= layer < layers.stop:
                    writer.place(layer - layers.start, epoch, phy2log_RS)
        for first in range(steps.start, steps.stop, BATCH_STEPS):
            last = min(steps.stop, first + BATCH_STEPS)
            _copy_batch(trace, writer, first, last, layers)
            if on_steps is not None:
                on_steps(last - steps.start)


def _numbers(trace: Trace, layers: slice) -> tuple[int, ...]:
    """The model's numbers of the layers that are kept; none where they are 0, 1, 2 and so on."""
    numbers = (trace.facts.layer_numbers or tuple(range(trace.layers)))[layers]
    return () if numbers == tuple(range(len(numbers))) else numbers


def _copy_batch(trace: Trace, writer: TraceWriter, first: int, last: int, layers: slice) -> None:
    source_TRLE = trace.source_rows(first, last)
    known = {
        "step_T": trace.step_numbers(first, last),
        "tokens_T": trace.tokens(first, last),
        "phase_T": trace.phase_numbers(first, last),
        "source_TRLE": None if source_TRLE is None else source_TRLE[:, :, layers],
    }
    if isinstance(trace, StoredTrace) and trace.by_slot:
        slot_heat_TLP, epoch_TL = trace.slot_heat(first, last)
        writer.append_slots(slot_heat_TLP[:, layers], epoch_TL[:, layers], **known)
        return
    writer.append(trace.heat(first, last)[:, layers], **known)
