"""Heat in tables: CSV of weights, or one row per count in CSV or parquet, which pyarrow reads and writes."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import Counts, HeatError
from eplb_service.io.containers import check_fits_memory, check_size, one_line
from eplb_service.io.named_arrays import ReadAs, trace_of_arrays
from eplb_service.io.trace import ArrayTrace, TraceFacts
from eplb_service.placement import Float64

COLUMNS = ("step", "layer", "expert", "tokens")
"""Columns of a table with one row per count; what no row names is 0."""
PARQUET_MAGIC = b"PAR1"


def read_csv_trace(path: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace of a ``.csv``: header ``step,layer,expert,tokens`` and one row per count, or a plain table of weights.

    A table without a header has one row per layer and one column per expert. Raises ``HeatError`` (without the path)
    naming the line that cannot be read.
    """
    check_size(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = next(csv.reader([file.readline()]), [])
        names = [name.strip().lower() for name in head]
        if not names:
            raise HeatError("is empty")
        if set(COLUMNS) <= set(names):
            columns = [names.index(name) for name in COLUMNS]
            return _trace_of_rows(_numbers(path, skiprows=1, usecols=columns), "CSV, one row per count")
        table = _numbers(path)
    except UnicodeDecodeError as error:
        raise HeatError("is neither text nor any kind of trace that is known") from error
    except (ValueError, csv.Error) as error:
        if isinstance(error, HeatError):
            raise
        raise HeatError(
            f"is no CSV of {','.join(COLUMNS)} or of plain numbers ({one_line(error)})"
        ) from error
    if table.shape[1] == len(COLUMNS) and len(table) > 1 and read_as.meaning is None:
        raise HeatError(
            f"has {len(COLUMNS)} columns and no header: put {','.join(COLUMNS)} above them if its rows are counts, or "
            "say --as weights if its rows are layers"
        )
    return trace_of_arrays({"": table}, "CSV", read_as)


def _trace_of_rows(rows: Float64, origin: str, first_line: int = 2) -> ArrayTrace:
    """The trace in rows of ``COLUMNS``, ``[rows, 4]``; what no row names is 0.

    Raises
    ------
    HeatError
        Without the path: naming the first row, counted from ``first_line``, that is no count.
    """
    if not len(rows):
        raise HeatError("holds a header and no rows")
    places = rows[:, :3]
    if not np.isfinite(rows).all() or (places < 0).any() or (places != np.floor(places)).any():
        line = int(
            np.flatnonzero((~np.isfinite(rows) | (rows < 0)).any(axis=1) | (places % 1 != 0).any(axis=1))[0]
        )
        place = f"{'line' if first_line == 2 else 'row'} {line + first_line}"
        raise HeatError(f"{place} holds {rows[line].tolist()}; expected {', '.join(COLUMNS)} from 0 on")
    if places.max() >= 2**31:
        raise HeatError(f"names {','.join(COLUMNS[:3])} up to {int(places.max())}, past 2**31")
    step_K, layer_K, expert_K = places.astype(np.int64).T
    step_K -= step_K.min()
    shape = (int(step_K.max()) + 1, int(layer_K.max()) + 1, int(expert_K.max()) + 1)
    check_fits_memory(shape[0] * shape[1] * shape[2] * 8)
    heat_TLE = np.zeros(shape)
    np.add.at(heat_TLE, (step_K, layer_K, expert_K), rows[:, 3])
    whole = (heat_TLE == np.floor(heat_TLE)).all()
    return ArrayTrace(heat_TLE.astype(np.int64) if whole else heat_TLE, TraceFacts(origin=origin))


def _rows_of(heat_TLE: Counts, first: int, steps: int) -> Float64:
    """Rows of ``COLUMNS`` for the counts of the steps from ``first`` on, of ``steps`` in all, float64 ``[rows, 4]``.

    Counts of 0 have none, but for the first and the last of a trace: by them its shape can be read back.
    """
    named_TLE = heat_TLE != 0
    if first == 0:
        named_TLE[0, 0, 0] = True
    if first + len(heat_TLE) == steps:
        named_TLE[-1, -1, -1] = True
    step_K, layer_K, expert_K = np.nonzero(named_TLE)
    rows: Float64 = np.stack([step_K + first, layer_K, expert_K, heat_TLE[named_TLE]], axis=1).astype(
        np.float64
    )
    return rows


def write_table(path: Path, parts: Iterable[tuple[int, Counts]], steps: int, *, whole: bool) -> None:
    """Write heat as a table with one row per count, ``.csv`` or ``.parquet``, which needs pyarrow.

    ``parts`` are stretches of the trace's ``steps``, each with its first step; ``whole`` tokens become integers. Raises
    ``OSError`` where the disk refuses.
    """
    rows = (_rows_of(heat_TLE, first, steps) for first, heat_TLE in parts)
    if path.suffix == ".parquet":
        _write_parquet_rows(path, rows, whole=whole)
        return
    with path.open("w", encoding="utf-8") as file:
        for number, part in enumerate(rows):
            file.write(_csv_text(part, headed=number == 0))


def _csv_text(rows: Float64, *, headed: bool) -> str:
    """Rows as lines of a CSV, under the names of the columns where they are ``headed``."""
    lines = [",".join(COLUMNS)] if headed else []
    for step, layer, expert, tokens in rows.tolist():
        lines.append(f"{step:.0f},{layer:.0f},{expert:.0f},{tokens!r}".removesuffix(".0"))
    return "\n".join(lines) + "\n"


def _numbers(path: Path, **which: Any) -> Float64:
    with warnings.catch_warnings():
        # That there are none is for the caller to say.
        warnings.filterwarnings("ignore", message=".*input contained no data", category=UserWarning)
        return np.loadtxt(path, delimiter=",", ndmin=2, encoding="utf-8-sig", **which)


def check_pyarrow() -> None:
    """Raise ``HeatError`` (without a path) where pyarrow is missing, or too new for the numpy that is installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise HeatError(
            f"is parquet, for which pyarrow is needed: pip install 'eplb-service[tables]' ({error})"
        ) from error


def _write_parquet_rows(path: Path, parts: Iterable[Float64], *, whole: bool) -> None:
    """Write rows of ``COLUMNS``, float64 ``[rows, 4]``, a group for each part; ``whole`` tokens as integers.

    Needs pyarrow. Raises ``OSError`` where the disk refuses.
    """
    import pyarrow as pa
    from pyarrow import parquet

    kinds = (pa.int32(), pa.int32(), pa.int32(), pa.int64() if whole else pa.float64())
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in parts:
            columns = {name: rows[:, number] for number, name in enumerate(COLUMNS)}
            writer.write_table(pa.table(columns).cast(schema))


def read_parquet_trace(path: Path) -> ArrayTrace:
    """The trace of a ``.parquet``; raises ``HeatError`` (without the path)."""
    check_pyarrow()
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
        if missing:
            raise HeatError(f"has no column {missing[0]}; expected {', '.join(COLUMNS)}")
        check_fits_memory(8 * len(COLUMNS) * file.metadata.num_rows)
        table = file.read(columns=list(COLUMNS))
        rows = np.stack([table.column(name).to_numpy().astype(np.float64) for name in COLUMNS], axis=1)
    except (ArrowException, OSError, ValueError, TypeError) as error:
        if isinstance(error, HeatError):
            raise
        raise HeatError(f"is damaged, or holds no plain numbers ({one_line(error)})") from error
    return _trace_of_rows(rows, "parquet, one row per count", first_line=1)
