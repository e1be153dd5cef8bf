"""Tables of heat: CSV or parquet with one row per count, or CSV of weights. Only parquet needs pyarrow."""

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
"""Suffixes of the tables that can be written."""
COLUMNS = ("step", "layer", "expert", "tokens")
"""Columns of a table with one row per count. Counts without a row are 0."""
PARQUET_MAGIC = b"PAR1"
_ROW_BYTES = 96
"""Memory needed to read one row, in bytes: its four columns as read, converted and combined, at 64 bits each."""
_HEADER_BYTES = 1 << 16
_NOT_CSV = "is neither a CSV of plain numbers nor a file in another known format"
_NO_ROWS = "has a header but no rows"
_EXPERT_COLUMN = re.compile(r"(?:expert|e)?[ _-]?(\d{1,6})", re.IGNORECASE)


def read_table_trace(path: Path, read_as: ReadAs) -> ArrayTrace:
    """Read the trace in a ``.csv`` or ``.parquet`` file.

    A table with the columns step, layer, expert and tokens has one row per count. A ``.csv`` without a header, or with
    a header such as ``expert_0,expert_1``, is a table of weights, with one row per layer and one column per expert.
    Raises ``HeatError``; the message does not name the path.
    """
    packed = path.stat().st_size
    check_fits_memory(packed)
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    if head.startswith(PARQUET_MAGIC):
        return _trace_of_rows(_parquet_rows(path, packed), "Parquet, one row per count", packed, read_as)
    header = _csv_header(head)
    rows = _csv_rows(path, header)
    if set(COLUMNS) <= set(header):
        columns = [header.index(name) for name in COLUMNS]
        return _trace_of_rows(rows[:, columns], "CSV, one row per count", packed, read_as)
    if header:
        rows = rows[:, _expert_columns(header)]
    elif rows.shape[1] == len(COLUMNS) and len(rows) > 1 and read_as.meaning is None:
        raise HeatError(
            f"has {len(COLUMNS)} columns and no header: add the header {','.join(COLUMNS)} if its rows are counts, or "
            "use --as weights if its rows are layers"
        )
    return trace_of_arrays({"": rows}, "CSV", read_as)


def require_parquet() -> None:
    """Raise ``HeatError`` if pyarrow is missing. The message does not name the path."""
    require("pyarrow", "a Parquet file", "tables")


def _parquet_rows(path: Path, packed: int) -> Float64:
    """Read ``COLUMNS`` of a Parquet file, float64 ``[rows, 4]``."""
    require_parquet()
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        check_fits_memory(_ROW_BYTES * file.metadata.num_rows, packed)
        _check_numbers(file.schema_arrow)
        table = file.read(columns=list(COLUMNS))
        return np.stack([table.column(name).cast("float64").to_numpy() for name in COLUMNS], axis=1)
    except (ArrowException, OSError, KeyError, ValueError) as error:
        if isinstance(error, HeatError):
            raise
        raise HeatError(
            f"is not a Parquet file with the columns {', '.join(COLUMNS)} ({one_line(error)})"
        ) from error


def _check_numbers(schema: Any) -> None:
    """Raise ``HeatError`` if a column is not numeric. A small file can repeat one long string in many rows."""
    from pyarrow import types

    for field in schema:
        if field.name in COLUMNS and not (types.is_integer(field.type) or types.is_floating(field.type)):
            raise HeatError(f"has column {field.name} of type {field.type}; expected numbers")


def _csv_header(head: bytes) -> list[str]:
    """Return the column names of a CSV, or an empty list if its first line has only numbers.

    Raises ``HeatError`` if the file is not text.
    """
    line, _, _ = head.partition(b"\n")
    try:
        first = next(csv.reader([line.decode("utf-8-sig").strip("\r")]), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise HeatError(f"{_NOT_CSV} ({one_line(error)})") from error
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
            # A table without rows is rejected below.
            warnings.simplefilter("ignore", UserWarning)
            if header:
                next(file)
            rows: Float64 = np.loadtxt(file, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as error:
        if set(COLUMNS) <= set(header):
            raise HeatError(f"is not a CSV of plain numbers ({one_line(error)})") from error
        first_line = f"its first line is {','.join(header)[:60]!r}; " if header else ""
        raise HeatError(f"{_NOT_CSV} ({first_line}{one_line(error)[:100]})") from error
    if not rows.size:
        raise HeatError(_message_for_no_rows(header))
    if header and rows.shape[1] != len(header):
        raise HeatError(f"has {len(header)} names in its header, but {rows.shape[1]} columns")
    return rows


def _message_for_no_rows(header: list[str]) -> str:
    """Return the error message for a file without numbers."""
    if not header:
        return "is empty"
    is_table = set(COLUMNS) <= set(header) or all(map(_EXPERT_COLUMN.fullmatch, header))
    return _NO_ROWS if is_table else _NOT_CSV


def _expert_columns(header: list[str]) -> list[int]:
    """Return the column index of each expert. Raises ``HeatError`` if the header does not name every expert."""
    matches = [_EXPERT_COLUMN.fullmatch(name) for name in header]
    column_of = {int(match[1]): column for column, match in enumerate(matches) if match}
    if not all(matches) or sorted(column_of) != list(range(len(header))):
        raise HeatError(
            f"has header {','.join(header)[:80]!r}; expected {','.join(COLUMNS)} for one row per count, or "
            "expert_0,expert_1,... for one row of weights per layer"
        )
    return [column_of[expert] for expert in range(len(header))]


def _trace_of_rows(rows: Float64, origin: str, packed: int, read_as: ReadAs) -> ArrayTrace:
    """Build the trace from a table with one row per count.

    The trace has only the layers that occur in the table. It has as many experts as the user specifies or, by default,
    all experts up to the largest in the table.

    Parameters
    ----------
    rows
        Numbers in ``COLUMNS``, ``[rows, 4]``.
    origin
        Format of the file.
    packed
        Size of the file in bytes.
    read_as
        Facts that the user provides.

    Raises
    ------
    HeatError
        If a row is not a count. The message names the first such row.
    """
    read_as.refuse_unused("a table of counts", "experts")
    if not len(rows):
        raise HeatError(_NO_ROWS)
    invalid = (
        ~(rows[:, :3] < 2**31).all(axis=1) | (rows[:, :3] % 1 != 0).any(axis=1) | ~(rows >= 0).all(axis=1)
    )
    invalid |= ~np.isfinite(rows[:, 3])
    if invalid.any():
        row = int(np.argmax(invalid))
        raise HeatError(
            f"row {row + 1} holds {rows[row].tolist()}; expected {', '.join(COLUMNS)} as non-negative numbers"
        )
    step_K, layer_K, expert_K = rows[:, :3].astype(np.int64).T
    step_K -= step_K.min()
    layers, row_K = np.unique(layer_K, return_inverse=True)
    experts = int(expert_K.max()) + 1
    if read_as.experts is None:
        origin += f", {experts} experts, inferred from the highest expert id"
    elif experts > read_as.experts:
        raise HeatError(f"refers to expert {experts - 1}, but --experts is {read_as.experts}")
    shape = (int(step_K.max()) + 1, len(layers), read_as.experts or experts)
    check_fits_memory(shape[0] * shape[1] * shape[2] * 8, packed)
    heat_TLE = np.zeros(shape)
    np.add.at(heat_TLE, (step_K, row_K, expert_K), rows[:, 3])
    is_whole = (heat_TLE == np.floor(heat_TLE)).all()
    facts = TraceFacts(origin=origin, layer_numbers=numbered(layers.tolist()))
    return ArrayTrace(heat_TLE.astype(np.int64) if is_whole else heat_TLE, facts)


def write_table(path: Path, heat_batches: Iterable[Counts], steps: int, layer_numbers: Sequence[int]) -> None:
    """Write heat as a ``.csv`` or ``.parquet`` table with one row per count.

    Counts of 0 are omitted, except for each layer's first and last count, so that the shape can be read back.

    Parameters
    ----------
    path
        File to write.
    heat_batches
        Heat of consecutive ranges of steps.
    steps
        Total number of steps.
    layer_numbers
        The model's own number of each layer.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    numbers = np.asarray(layer_numbers)
    writer_type = _ParquetWriter if path.suffix == PARQUET else _CsvWriter
    first = 0
    with writer_type(path) as writer:
        for heat_TLE in heat_batches:
            written_TLE = heat_TLE != 0
            written_TLE[0, :, 0] |= first == 0
            written_TLE[-1, :, -1] |= first + len(heat_TLE) == steps
            step_K, row_K, expert_K = np.nonzero(written_TLE)
            writer.write([step_K + first, numbers[row_K], expert_K, heat_TLE[written_TLE]])
            first += len(heat_TLE)


class _CsvWriter:
    """Writer that appends batches of rows as lines of text."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="ascii", newline="\n")
        self._file.write(",".join(COLUMNS) + "\n")

    def __enter__(self) -> _CsvWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, columns: list[Any]) -> None:
        """Append one row per entry of the columns. Numbers are written so that they read back exactly."""
        texts = [map(repr, column.tolist()) for column in columns]
        self._file.writelines(f"{','.join(row)}\n" for row in zip(*texts, strict=True))


class _ParquetWriter:
    """Writer that appends batches of rows as row groups of a Parquet file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def __enter__(self) -> _ParquetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: list[Any]) -> None:
        """Append one row per entry of the columns."""
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
        self._writer = self._writer or parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
