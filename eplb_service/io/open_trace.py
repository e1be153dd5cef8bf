"""Open a trace in any known format. The format is detected from the file's content, not from its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from eplb_core.heat.window import Counts, HeatError
from eplb_service.io import native
from eplb_service.io.containers import (
    Record,
    as_array,
    check_covers_run,
    read_json,
    read_npy,
    read_npz,
    read_torch,
    records_of,
)
from eplb_service.io.formats import expert_counts, routed_experts, sglang, tables
from eplb_service.io.named_arrays import ReadAs, trace_of_arrays
from eplb_service.io.trace import ArrayTrace, Trace, without_dense_layers
from eplb_service.io.zarr_column import METADATA

KNOWN = f"{native.SUFFIX} folder, .npz, .npy, .pt, a folder of ranks' files, .json, .jsonl, .csv or .parquet"
"""List of the formats that can be opened, for messages and help texts."""

FORMATS_GROUP = "eplb.formats"
"""Entry-point group through which installed packages add formats. Each entry point is a ``TraceReader``."""
TraceReader: TypeAlias = Callable[[Path, ReadAs], Trace | None]
"""Reader for an added format, called before the built-in readers.

It returns the trace in a file or folder, or ``None`` if it does not recognise the format.
"""

_RECORDS = (expert_counts.RECORDS, routed_experts.RECORDS, routed_experts.RESPONSES)
"""Kinds of records, each with a function that recognises a record and a reader for a series of them."""


def open_trace(path: Path, read_as: ReadAs | None = None) -> Trace:
    """Open a trace in any known format.

    Native traces and ``.npy`` files are read lazily, in slices. All other formats are read completely.

    Parameters
    ----------
    path
        File or folder. Its content determines the format.
    read_as
        Facts that the content does not state, such as the number of experts, the map, or the batch size.

    Returns
    -------
    Trace
        Trace whose heat can be read in ranges of steps, with facts about its origin.

    Raises
    ------
    HeatError
        If the file cannot be read, or its meaning is ambiguous. The one-line message begins with the path.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> file = Path(tempfile.mkdtemp()) / "example.npz"
    >>> np.savez(file, heat=np.array([[[3, 1]], [[2, 4]]]))
    >>> trace = open_trace(file)
    >>> trace.shape, trace.facts.origin
    ((2, 1, 2), 'numpy .npz, tokens by logical expert')
    >>> trace.heat(1, 2)
    array([[[2, 4]]])
    """
    read_as = read_as or ReadAs()
    with naming(path):
        trace = _opened_by_packages(path, read_as) or _open(path, read_as)
        if isinstance(trace, ArrayTrace):
            trace = without_dense_layers(trace)
        if read_as.experts not in (None, trace.experts):
            raise HeatError(f"has {trace.experts} experts, but --experts is {read_as.experts}")
        return trace


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Convert any error while reading the trace at ``path`` to a ``HeatError`` whose message begins with the path."""
    try:
        yield
    except OSError as error:
        raise HeatError(f"{path}: cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise HeatError(f"{path}: does not fit in memory; convert it piece by piece") from error
    except HeatError as error:
        raise HeatError(f"{path}: {error}") from error


def read_heat(path: Path, read_as: ReadAs | None = None) -> Counts:
    """Return all heat in a trace, ``[T, L, E]``: int64, or float64 if it has fractions. Raises ``HeatError``."""
    trace = open_trace(path, read_as)
    with naming(path):
        return trace.heat(0, trace.steps)


@cache
def _formats_of_packages() -> tuple[tuple[str, TraceReader], ...]:
    """Load the readers that installed packages declare. Raises ``HeatError`` naming any that cannot be imported."""
    readers = []
    for entry in sorted(metadata.entry_points(group=FORMATS_GROUP), key=lambda entry: entry.name):
        try:
            readers.append((entry.name, entry.load()))
        except Exception as error:
            raise HeatError(
                f"the trace format {entry.name} ({entry.value}) cannot be loaded: {error}"
            ) from error
    return tuple(readers)


def _opened_by_packages(path: Path, read_as: ReadAs) -> Trace | None:
    """Open the file with the first added format that recognises it, or return ``None``."""
    path.stat()
    for name, read in _formats_of_packages():
        try:
            trace = read(path, read_as)
        except (HeatError, OSError, MemoryError):
            raise
        except Exception as error:
            raise HeatError(f"the trace format {name} failed: {error!r:.200}") from error
        if trace is not None and not isinstance(trace, Trace):
            raise HeatError(
                f"the trace format {name} returned a {type(trace).__name__}; expected a Trace or None"
            )
        if trace is not None:
            return trace
    return None


def _open(path: Path, read_as: ReadAs) -> Trace:
    """Open a folder, or a file in a built-in format, which its first bytes determine."""
    if path.is_dir():
        return _open_folder(path, read_as)
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(b"\x93NUMPY"):
        return trace_of_arrays({"": read_npy(path)}, "numpy .npy", read_as, path.stem)
    if head.startswith(b"PK"):
        if arrays := read_npz(path):
            return trace_of_arrays(arrays, "numpy .npz", read_as)
        return _trace_of_document(read_torch(path), "torch .pt", read_as, path)
    if head.startswith(b"\x80"):
        raise HeatError(
            "is a pickle, which could run code; save it as .npz, or with torch.save in torch 1.6 or later"
        )
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        check_covers_run(path, routed_experts.RANK_FILE)
        document = read_json(path)
        if isinstance(document, Iterator):
            return _trace_of_records(records_of(document), read_as)
        return _trace_of_document(document, "JSON", read_as, path)
    return tables.read_table_trace(path, read_as)


def _open_folder(folder: Path, read_as: ReadAs) -> Trace:
    """Open a folder: a native trace, or the files that the ranks of one run wrote."""
    if (folder / METADATA).exists():
        read_as.refuse_unused("a native trace", "experts")
        return native.StoredTrace(folder)
    for is_folder, read in (expert_counts.FOLDER, routed_experts.FOLDER):
        if is_folder(folder):
            return read(folder, read_as)
    files = sorted(folder.glob("*.pt"))
    if not files:
        raise HeatError(f"is a folder in an unknown format; known formats are {KNOWN}")
    dumps = []
    for file in files:
        with naming(Path(file.name)):
            document = read_torch(file)
            if len(files) == 1:
                return _trace_of_document(document, "torch .pt", read_as, file)
            if not sglang.is_dump(document):
                raise HeatError("has no records of forward passes; open this file instead of the folder")
            dumps.append((file.name, document))
    return sglang.trace_of_dumps(dumps, read_as)


def _trace_of_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """Build the trace from records. The first record determines their kind."""
    remaining = iter(records)
    first = next(remaining, None)
    if first is None:
        raise HeatError("has no records")
    location, content = first
    for is_record, read in _RECORDS:
        if is_record(content):
            return read(itertools.chain([first], remaining), read_as)
    raise HeatError(f"{location} is not a record of a known kind; its fields are {_names(content)}")


def _trace_of_document(document: Any, origin: str, read_as: ReadAs, path: Path) -> ArrayTrace:
    """Build the trace from a document.

    A document can be a dump of SGLang's recorder (``logical_count``, or ``records`` of forward passes), one record or a
    list of records of a known kind, a dictionary of named arrays (see ``trace_of_arrays``), or a bare array.
    """
    bare = as_array(document)
    if bare is not None:
        return trace_of_arrays({"": bare}, origin, read_as, path.stem)
    if isinstance(document, list):
        return _trace_of_records(records_of(document), read_as)
    if not isinstance(document, Mapping):
        raise HeatError(f"holds a {type(document).__name__}; expected an array, or a dictionary of arrays")
    if sglang.is_dump(document):
        check_covers_run(path, sglang.RANK_FILE)
        return sglang.trace_of_dumps([(origin, document)], read_as)
    if any(is_record(document) for is_record, _ in _RECORDS):
        return _trace_of_records(records_of(document), read_as)
    arrays = {str(name): array for name, value in document.items() if (array := as_array(value)) is not None}
    counts_TLE = arrays.get("logical_count")
    if counts_TLE is not None and counts_TLE.ndim == 3 and read_as.meaning in (None, "heat"):
        return sglang.trace_of_ring_buffer(counts_TLE, origin, read_as)
    if not arrays:
        raise HeatError(f"has no array of numbers; its fields are {_names(document)}")
    return trace_of_arrays(arrays, origin, read_as)


def _names(content: Mapping[Any, Any]) -> str:
    """List the first fields of a record or document for a message."""
    return ", ".join(map(str, list(content)[:8])) or "nothing"
