"""Heat in tables: CSV of weights, or one row per count in CSV or parquet; pyarrow reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import Counts, HeatError
from eplb_service.io.containers import check_fits_memory, one_line, require
from eplb_service.io.named_arrays import ReadAs, trace_of_arrays
from eplb_service.io.trace import ArrayTrace, TraceFacts
from eplb_service.placement import Float64

SUFFIXES = (".csv", ".parquet")
COLUMNS = ("step", "layer", "expert", "tokens")
"""Columns of a table with one row per count; what no row names is 0."""
PARQUET_MAGIC = b"PAR1"
_ROW_BYTES = 96
"""Memory of a row while it is read: its columns, as numbers of 64 bits, and side by side."""


def read_table_trace(path: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace of a ``.csv`` or ``.parquet`` with the columns step, layer, expert and tokens, a row for each count.

    A ``.csv`` without this header is a table of weights, a row per layer and a column per expert. Raises ``HeatError``
    (without the path).
    """
    require("pyarrow", "a table", "tables")
    from pyarrow import ArrowException, csv, parquet

    packed = path.stat().st_size
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
        check_fits_memory(packed)
        headed = b"expert" in head.split(b"\n")[0]
        kind = "parquet" if head.startswith(PARQUET_MAGIC) else "CSV"
        if kind == "parquet":
            found = parquet.ParquetFile(path)
            check_fits_memory(_ROW_BYTES * found.metadata.num_rows, packed)
            _check_numbers(found.schema_arrow)
            table, headed = found.read(columns=list(COLUMNS)), True
        else:
            table = csv.read_csv(
                path, csv.ReadOptions(use_threads=False, autogenerate_column_names=not headed)
            )
        names = COLUMNS if headed else table.column_names
        rows = np.stack([table.column(name).cast("float64").to_numpy() for name in names], axis=1)
    except (ArrowException, OSError, KeyError, ValueError) as error:
        if isinstance(error, HeatError):
            raise
        raise HeatError(
            f"is no {kind} of {', '.join(COLUMNS)}, nor of plain numbers ({one_line(error)})"
        ) from error
    if headed:
        return _trace_of_rows(rows, f"{kind}, one row per count", packed)
    if rows.shape[1] == len(COLUMNS) and len(rows) > 1 and read_as.meaning is None:
        raise HeatError(
            f"has {len(COLUMNS)} columns and no header: put {','.join(COLUMNS)} above them if its rows are counts, or "
            "say --as weights if its rows are layers"
        )
    return trace_of_arrays({"": rows}, "CSV", read_as)


def _check_numbers(schema: Any) -> None:
    """Raise ``HeatError`` where a column holds no plain numbers: one long text may be that of many rows."""
    from pyarrow import types

    for field in schema:
        if field.name in COLUMNS and not (types.is_integer(field.type) or types.is_floating(field.type)):
            raise HeatError(f"has the column {field.name} of {field.type}; expected numbers")


def _trace_of_rows(rows: Float64, origin: str, packed: int) -> ArrayTrace:
    """The trace in rows of ``COLUMNS``, ``[rows, 4]``, of a file of so many bytes.

    Raises ``HeatError`` naming the first row that is no count.
    """
    if not len(rows):
        raise HeatError("holds a header and no rows")
    bad = ~(rows[:, :3] < 2**31).all(axis=1) | (rows[:, :3] % 1 != 0).any(axis=1) | ~(rows >= 0).all(axis=1)
    bad |= ~np.isfinite(rows[:, 3])
    if bad.any():
        row = int(np.argmax(bad))
        raise HeatError(f"row {row + 1} holds {rows[row].tolist()}; expected {', '.join(COLUMNS)} from 0 on")
    step_K, layer_K, expert_K = rows[:, :3].astype(np.int64).T
    step_K -= step_K.min()
    shape = (int(step_K.max()) + 1, int(layer_K.max()) + 1, int(expert_K.max()) + 1)
    check_fits_memory(shape[0] * shape[1] * shape[2] * 8, packed)
    heat_TLE = np.zeros(shape)
    np.add.at(heat_TLE, (step_K, layer_K, expert_K), rows[:, 3])
    whole = (heat_TLE == np.floor(heat_TLE)).all()
    return ArrayTrace(heat_TLE.astype(np.int64) if whole else heat_TLE, TraceFacts(origin=origin))


def write_table(path: Path, parts: Iterable[Counts], steps: int) -> None:
    """Write heat as a table with one row per count, ``.csv`` or ``.parquet``.

    ``parts`` are stretches of the trace's ``steps``, one after the other. Counts of 0 have no row, but for the first
    and the last of the trace: by them its shape can be read back. Raises ``OSError`` where the disk refuses.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    make = parquet.ParquetWriter if path.suffix == ".parquet" else csv.CSVWriter
    first, writer = 0, None
    for heat_TLE in parts:
        named_TLE = heat_TLE != 0
        named_TLE[0, 0, 0] |= first == 0
        named_TLE[-1, -1, -1] |= first + len(heat_TLE) == steps
        step_K, layer_K, expert_K = np.nonzero(named_TLE)
        columns = (step_K + first, layer_K, expert_K, heat_TLE[named_TLE])
        table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
        writer = writer or make(path, table.schema)
        writer.write_table(table)
        first += len(heat_TLE)
    if writer is not None:
        writer.close()
