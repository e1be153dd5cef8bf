"""Tables of heat: CSV of weights, or CSV or parquet with one row per count. Only parquet needs pyarrow."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core.heat.window import Counts, HeatError
from eplb_core.placement import Float64
from eplb_service.io.containers import check_fits_memory, one_line, require
from eplb_service.io.named_arrays import ReadAs, trace_of_arrays
from eplb_service.io.trace import ArrayTrace, TraceFacts, numbered

PARQUET = ".parquet"
SUFFIXES = (".csv", PARQUET)
COLUMNS = ("step", "layer", "expert", "tokens")
"""Columns of a table with one row per count; what no row names is 0."""
PARQUET_MAGIC = b"PAR1"
_ROW_BYTES = 96
"""Memory of a row while it is read: its columns, as numbers of 64 bits, and side by side."""
_HEADER_BYTES = 1 << 16
_EXPERT_COLUMN = re.compile(r"(?:expert|e)?[ _-]?(\d{1,6})", re.IGNORECASE)


def read_table_trace(path: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace of a ``.csv`` or ``.parquet`` with the columns step, layer, expert and tokens, a row for each count.

    A ``.csv`` without a header, or with one like ``expert_0,expert_1``, is a table of weights: a row per layer and a
    column per expert. Raises ``HeatError`` (without the path).
    """
    packed = path.stat().st_size
    check_fits_memory(packed)
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    if head.startswith(PARQUET_MAGIC):
        return _trace_of_rows(_parquet_rows(path, packed), "parquet, one row per count", packed, read_as)
    header = _csv_header(head)
    rows = _csv_rows(path, header)
    if set(COLUMNS) <= set(header):
        columns = [header.index(name) for name in COLUMNS]
        return _trace_of_rows(rows[:, columns], "CSV, one row per count", packed, read_as)
    if header:
        rows = rows[:, _expert_columns(header)]
    elif rows.shape[1] == len(COLUMNS) and len(rows) > 1 and read_as.meaning is None:
        raise HeatError(
            f"has {len(COLUMNS)} columns and no header: put {','.join(COLUMNS)} above them if its rows are counts, or "
            "say --as weights if its rows are layers"
        )
    return trace_of_arrays({"": rows}, "CSV", read_as)


def require_parquet() -> None:
    """Raise ``HeatError`` (without a path) if pyarrow is missing."""
    require("pyarrow", "parquet", "tables")


def _parquet_rows(path: Path, packed: int) -> Float64:
    """Read ``COLUMNS`` of a parquet file, float64 ``[rows, 4]``."""
    require_parquet()
    from pyarrow import ArrowException, parquet

    try:
        found = parquet.ParquetFile(path)
        check_fits_memory(_ROW_BYTES * found.metadata.num_rows, packed)
        _check_numbers(found.schema_arrow)
        table = found.read(columns=list(COLUMNS))
        return np.stack([table.column(name).cast("float64").to_numpy() for name in COLUMNS], axis=1)
    except (ArrowException, OSError, KeyError, ValueError) as error:
        if isinstance(error, HeatError):
            raise
        raise HeatError(f"is no parquet of {', '.join(COLUMNS)} ({one_line(error)})") from error


def _check_numbers(schema: Any) -> None:
    """Raise ``HeatError`` where a column holds no plain numbers: one long text may be that of many rows."""
    from pyarrow import types

    for field in schema:
        if field.name in COLUMNS and not (types.is_integer(field.type) or types.is_floating(field.type)):
            raise HeatError(f"has the column {field.name} of {field.type}; expected numbers")


def _csv_header(head: bytes) -> list[str]:
    """Return the column names of a CSV; none if its first line holds numbers. Raises ``HeatError`` if it is no text."""
    line, _, _ = head.partition(b"\n")
    try:
        first = next(csv.reader([line.decode("utf-8-sig").strip("\r")]), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise HeatError(
            f"is no CSV of plain numbers, nor of another known format ({one_line(error)})"
        ) from error
    names = [name.strip() for name in first]
    return [] if names and all(map(_is_number, names)) else names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _csv_rows(path: Path, header: list[str]) -> Float64:
    """Read the numbers below the header, float64 ``[rows, columns]``."""
    try:
        with path.open(encoding="utf-8-sig") as file, warnings.catch_warnings():
            # A table without rows is refused below.
            warnings.simplefilter("ignore", UserWarning)
            if header:
                next(file)
            rows: Float64 = np.loadtxt(file, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as error:
        if set(COLUMNS) <= set(header):
            raise HeatError(f"is no CSV of plain numbers ({one_line(error)})") from error
        found = f"its first line is {','.join(header)[:60]!r}; " if header else ""
        raise HeatError(
            f"is no CSV of plain numbers, nor of another known format ({found}{one_line(error)[:100]})"
        ) from error
    if not rows.size:
        raise HeatError(_about_no_rows(header))
    if header and rows.shape[1] != len(header):
        raise HeatError(f"has {len(header)} names in its header and {rows.shape[1]} columns")
    return rows


def _about_no_rows(header: list[str]) -> str:
    if not header:
        return "is empty"
    known = set(COLUMNS) <= set(header) or all(map(_EXPERT_COLUMN.fullmatch, header))
    return (
        "holds a header and no rows" if known else "is no CSV of plain numbers, nor of another known format"
    )


def _expert_columns(header: list[str]) -> list[int]:
    """Return the columns of experts 0, 1, ... by their names; raises ``HeatError`` if the names do not number them."""
    matches = [_EXPERT_COLUMN.fullmatch(name) for name in header]
    column_of = {int(match[1]): column for column, match in enumerate(matches) if match}
    if not all(matches) or sorted(column_of) != list(range(len(header))):
        raise HeatError(
            f"has the header {','.join(header)[:80]!r}; expected {','.join(COLUMNS)} for a row per count, or "
            "expert_0,expert_1,... for a row of weights per layer"
        )
    return [column_of[expert] for expert in range(len(header))]


def _trace_of_rows(rows: Float64, origin: str, packed: int, read_as: ReadAs) -> ArrayTrace:
    """The trace in rows of ``COLUMNS``, ``[rows, 4]``, of a file of so many bytes.

    Layers that no row names are not part of it. Experts that none names are, up to the number that ``read_as`` states.
    Raises ``HeatError`` naming the first row that is no count.
    """
    read_as.refuse_unused("a table of counts", "experts")
    if not len(rows):
        raise HeatError("holds a header and no rows")
    bad = ~(rows[:, :3] < 2**31).all(axis=1) | (rows[:, :3] % 1 != 0).any(axis=1) | ~(rows >= 0).all(axis=1)
    bad |= ~np.isfinite(rows[:, 3])
    if bad.any():
        row = int(np.argmax(bad))
        raise HeatError(f"row {row + 1} holds {rows[row].tolist()}; expected {', '.join(COLUMNS)} from 0 on")
    step_K, layer_K, expert_K = rows[:, :3].astype(np.int64).T
    step_K -= step_K.min()
    layers, row_K = np.unique(layer_K, return_inverse=True)
    named = int(expert_K.max()) + 1
    if read_as.experts is None:
        origin += f", {named} experts by the largest that is named"
    elif named > read_as.experts:
        raise HeatError(f"names expert {named - 1}, and --experts says that there are {read_as.experts}")
    shape = (int(step_K.max()) + 1, len(layers), read_as.experts or named)
    check_fits_memory(shape[0] * shape[1] * shape[2] * 8, packed)
    heat_TLE = np.zeros(shape)
    np.add.at(heat_TLE, (step_K, row_K, expert_K), rows[:, 3])
    whole = (heat_TLE == np.floor(heat_TLE)).all()
    facts = TraceFacts(origin=origin, layer_numbers=numbered(layers.tolist()))
    return ArrayTrace(heat_TLE.astype(np.int64) if whole else heat_TLE, facts)


def write_table(path: Path, parts: Iterable[Counts], steps: int, layer_numbers: Sequence[int]) -> None:
    """Write heat as a table with one row per count, ``.csv`` or ``.parquet``.

    ``parts`` are stretches of the trace's ``steps``, one after the other, and ``layer_numbers`` the model's own numbers
    of its layers. Counts of 0 have no row, except the first and the last of each layer: by them the shape can be read
    back. Raises ``OSError`` where the disk refuses.
    """
    numbers = np.asarray(layer_numbers)
    make = _ParquetWriter if path.suffix == PARQUET else _CsvWriter
    first = 0
    with make(path) as writer:
        for heat_TLE in parts:
            named_TLE = heat_TLE != 0
            named_TLE[0, :, 0] |= first == 0
            named_TLE[-1, :, -1] |= first + len(heat_TLE) == steps
            step_K, row_K, expert_K = np.nonzero(named_TLE)
            writer.write([step_K + first, numbers[row_K], expert_K, heat_TLE[named_TLE]])
            first += len(heat_TLE)


class _CsvWriter:
    """Writes columns of equal length, batch after batch, as lines of text."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="ascii", newline="\n")
        self._file.write(",".join(COLUMNS) + "\n")

    def __enter__(self) -> _CsvWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, columns: list[Any]) -> None:
        """Append one row for each entry of the columns; numbers read back as they were."""
        texts = [map(repr, column.tolist()) for column in columns]
        self._file.writelines(f"{','.join(row)}\n" for row in zip(*texts, strict=True))


class _ParquetWriter:
    """Writes columns of equal length, batch after batch, as row groups."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def __enter__(self) -> _ParquetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: list[Any]) -> None:
        """Append one row for each entry of the columns."""
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
        self._writer = self._writer or parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
