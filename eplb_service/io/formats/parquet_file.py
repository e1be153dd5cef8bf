"""Heat in a parquet table: columns step, layer, expert and tokens, a row per count. pyarrow reads and writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import check_fits_memory
from eplb_service.io.formats.csv_file import COLUMNS, trace_of_rows
from eplb_service.io.trace import ArrayTrace
from eplb_service.placement import Float64

MAGIC = b"PAR1"


def check_pyarrow() -> None:
    """Raise ``HeatError`` (without a path) where pyarrow is missing, or too new for the numpy that is installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise HeatError(
            f"is parquet, for which pyarrow is needed: pip install 'eplb-service[tables]' ({error})"
        ) from error


def write_parquet_rows(path: Path, parts: Iterable[Float64], *, whole: bool) -> None:
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
        raise HeatError(
            f"is damaged, or holds no plain numbers ({' '.join(str(error).split())[:200]})"
        ) from error
    return trace_of_rows(rows, "parquet, one row per count", first_line=1)
