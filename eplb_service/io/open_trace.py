"""Opens a trace of any known format, decided by what the file holds and not by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eplb_service.heat.window import Counts, HeatError
from eplb_service.io.containers.json_file import read_json
from eplb_service.io.containers.json_lines import holds_lines, read_lines
from eplb_service.io.containers.numpy_file import read_npy, read_npz
from eplb_service.io.containers.torch_file import read_torch
from eplb_service.io.containers.zarr_array import METADATA
from eplb_service.io.formats import megatron
from eplb_service.io.formats.csv_file import read_csv_trace
from eplb_service.io.formats.documents import trace_of_document, trace_of_lines
from eplb_service.io.formats.parquet_file import MAGIC as PARQUET
from eplb_service.io.formats.parquet_file import read_parquet_trace
from eplb_service.io.formats.sglang import is_dump, trace_of_dumps
from eplb_service.io.formats.tensorrt_llm import is_statistics, trace_of_statistics
from eplb_service.io.named_arrays import ReadAs, trace_of_arrays
from eplb_service.io.native import layout as native_layout
from eplb_service.io.native.reader import StoredTrace
from eplb_service.io.trace import Trace

KNOWN = f"{native_layout.SUFFIX} folder, .npz, .npy, .pt, a folder of ranks' files, .json, .jsonl, .csv or .parquet"
"""What can be opened, for messages and help."""

_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def open_trace(path: Path, read_as: ReadAs | None = None) -> Trace:
    """Open a trace of any known format; a native one and an ``.npy`` are read in slices, all others whole.

    Parameters
    ----------
    path
        File or folder; its format is recognised by its content.
    read_as
        What the content leaves open: model shape, placement, batching. By default nothing.

    Returns
    -------
    Trace
        Heat by ranges of steps, and what is known of its origin.

    Raises
    ------
    HeatError
        In one line that begins with the path: what was found, and what was expected.
    """
    with naming(path):
        return _open(path, read_as or ReadAs())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it, whatever is wrong with the trace at ``path`` ends in a ``HeatError`` that begins with the path."""
    try:
        yield
    except OSError as error:
        raise HeatError(f"{path}: cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise HeatError(f"{path}: does not fit into memory; convert it in parts") from error
    except HeatError as error:
        raise HeatError(f"{path}: {error}") from error


def read_heat(path: Path, read_as: ReadAs | None = None) -> Counts:
    """All heat of a trace at once, int64 (float64 where fractional) ``[T, L, E]``; raises as ``open_trace`` does."""
    trace = open_trace(path, read_as)
    with naming(path):
        return trace.heat(0, trace.steps)


def _open(path: Path, read_as: ReadAs) -> Trace:
    if path.is_dir():
        if (path / METADATA).exists():
            return StoredTrace(path)
        if is_statistics(path):
            return trace_of_statistics(path)
        if megatron.is_folder(path):
            return megatron.trace_of_folder(path, read_as)
        return _open_dumps(path, read_as)
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise HeatError("is empty")
    if head.startswith(b"\x93NUMPY"):
        return trace_of_arrays({"": read_npy(path)}, "numpy .npy", read_as, path.stem)
    if head.startswith(PARQUET):
        return read_parquet_trace(path)
    if head.startswith(b"PK"):
        return _open_zip(path, read_as)
    if head.startswith(_LEGACY_TORCH):
        raise HeatError("is a torch file from before torch 1.6; load and save it again with a newer torch")
    if head.startswith(b"\x80"):
        raise HeatError("is a pickle, which could run code; save it as .npz, or with torch.save")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return _open_json(path, read_as)
    if b"\x00" in head:
        raise HeatError(f"is none of the formats that are known: {KNOWN}")
    return read_csv_trace(path, read_as)


def _open_json(path: Path, read_as: ReadAs) -> Trace:
    """One document, or one record on each line."""
    megatron.check_alone(path)
    if holds_lines(path):
        return trace_of_lines(read_lines(path), read_as)
    return trace_of_document(read_json(path), "JSON", read_as, path)


def _open_dumps(folder: Path, read_as: ReadAs) -> Trace:
    """A folder of the files that SGLang's recorder wrote on each rank of one run, or of its one file for all."""
    files = sorted(folder.glob("*.pt"))
    if len(files) == 1:
        with naming(Path(files[0].name)):
            document = read_torch(files[0])
            return trace_of_document(document, "torch .pt", read_as, files[0])
    if not files:
        raise HeatError(f"is a folder without {METADATA} and without .pt files; a trace is one of: {KNOWN}")
    dumps = []
    for file in files:
        with naming(Path(file.name)):
            document = read_torch(file)
        if not is_dump(document):
            raise HeatError(f"{file.name}: holds no records of forward passes; open it by itself")
        dumps.append((file.name, document))
    return trace_of_dumps(dumps, read_as)


def _open_zip(path: Path, read_as: ReadAs) -> Trace:
    if path.suffix in (".pt", ".pth"):
        return trace_of_document(read_torch(path), "torch .pt", read_as, path)
    arrays = read_npz(path)
    if arrays:
        return trace_of_arrays(arrays, "numpy .npz", read_as)
    return trace_of_document(read_torch(path), "torch .pt", read_as, path)
