"""One array of a Zarr v3 store that grows along its first axis, written and read with numpy and gzip alone.

Only what a trace needs of the format: little-endian numbers, gzip, chunks that span all axes but the first. Any Zarr v3
library opens what is written here.

References
----------
Zarr core specification 3.0, https://zarr-specs.readthedocs.io/en/latest/v3/core/
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.atomic_write import write_atomically
from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array, check_fits_memory

METADATA = "zarr.json"
_CHUNK_BYTES = 4 << 20
_MOST_CHUNK_STEPS = 1024
_MOST_METADATA_BYTES = 1 << 20
_MOST_CHUNK_BYTES = 1 << 30
_GZIP = 31
"""zlib's word for a gzip header and trailer, with the checksum that shows damage."""
_LEVEL = 1
_TYPES = ("uint8", "int32", "uint32", "int64", "float64")


class ZarrArray:
    """An array ``[T, ...]`` in a folder of its own.

    ``rows`` is T: those that the metadata names. Chunks are written before it, so a crash between the two loses the
    newest rows and nothing else.
    """

    def __init__(
        self, folder: Path, rows: int, tail: tuple[int, ...], dtype: np.dtype[Any], chunk: int
    ) -> None:
        self.folder = folder
        self.rows = rows
        self.tail = tail
        self.dtype = dtype
        self.chunk = chunk
        self._names: tuple[str, ...] = ()
        self._kept: tuple[int, Array] | None = None

    @classmethod
    def create(cls, folder: Path, tail: tuple[int, ...], dtype: str, names: tuple[str, ...]) -> ZarrArray:
        """An empty array of rows ``tail``; ``names`` are those of all axes. Raises ``OutputError``."""
        row_bytes = np.dtype(dtype).itemsize * math.prod(tail)
        chunk = min(max(1, 1 << (_CHUNK_BYTES // row_bytes).bit_length() >> 1), _MOST_CHUNK_STEPS)
        array = cls(folder, 0, tail, np.dtype(dtype), chunk)
        array._names = names
        folder.mkdir()
        array.commit(0)
        return array

    @classmethod
    def open(cls, folder: Path) -> ZarrArray:
        """The array in ``folder``; raises ``HeatError`` where it is none of ours."""
        document = read_metadata(folder, "array")
        try:
            shape = [int(size) for size in document["shape"]]
            chunks = [int(size) for size in document["chunk_grid"]["configuration"]["chunk_shape"]]
            codecs = [codec["name"] for codec in document["codecs"]]
            separator = document["chunk_key_encoding"].get("configuration", {}).get("separator", "/")
            data_type, names = document["data_type"], document.get("dimension_names", ())
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise HeatError(f"{folder.name}/{METADATA} describes no array ({error!r})") from error
        if codecs != ["bytes", "gzip"] or data_type not in _TYPES or separator != "/":
            raise HeatError(
                f"{folder.name} is stored as {data_type} by {codecs}; expected numbers by bytes, gzip"
            )
        if not shape or min(shape[0], *chunks) < 0 or chunks[0] < 1 or chunks[1:] != shape[1:]:
            raise HeatError(f"{folder.name} has the shape {shape} in chunks {chunks}; expected whole rows")
        dtype = np.dtype(data_type)
        if dtype.itemsize * math.prod(chunks) > _MOST_CHUNK_BYTES:
            raise HeatError(f"{folder.name} claims chunks {chunks} of more than 1 GiB; it is damaged")
        array = cls(folder, shape[0], tuple(shape[1:]), dtype, chunks[0])
        array._names = tuple(map(str, names))
        return array

    def write(self, first: int, rows: Array) -> None:
        """Write ``rows`` from row ``first`` on (not before the last chunk begun); ``commit`` makes them count."""
        end = first + len(rows)
        for number in range(first // self.chunk, -(-end // self.chunk)):
            begin = number * self.chunk
            whole = np.zeros((self.chunk, *self.tail), dtype=self.dtype.newbyteorder("<"))
            if begin < first:
                whole[: first - begin] = self._read_chunk(number)[: first - begin]
            low, high = max(first, begin), min(end, begin + self.chunk)
            whole[low - begin : high - begin] = rows[low - first : high - first]
            path = self._path(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
            write_atomically(path, packer.compress(whole.tobytes()) + packer.flush())
            self._kept = (number, whole)

    def commit(self, rows: int) -> None:
        """Say in the metadata that the array now has ``rows`` rows."""
        self.rows = rows
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [rows, *self.tail],
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [self.chunk, *self.tail]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "gzip", "configuration": {"level": _LEVEL}},
            ],
            "dimension_names": list(self._names),
        }
        write_metadata(self.folder, document)

    def read(self, first: int, last: int) -> Array:
        """Rows ``first`` to ``last`` (not included); raises ``HeatError`` where a chunk is missing or damaged."""
        check_fits_memory((last - first) * math.prod(self.tail) * self.dtype.itemsize)
        out = np.empty((last - first, *self.tail), dtype=self.dtype)
        for number in range(first // self.chunk, -(-last // self.chunk)):
            begin = number * self.chunk
            low, high = max(first, begin), min(last, begin + self.chunk)
            out[low - first : high - first] = self._read_chunk(number)[low - begin : high - begin]
        return out

    def _read_chunk(self, number: int) -> Array:
        if self._kept is not None and self._kept[0] == number:
            return self._kept[1]
        path = self._path(number)
        size = self.dtype.itemsize * self.chunk * math.prod(self.tail)
        where = path.relative_to(self.folder.parent)
        try:
            unpacker = zlib.decompressobj(_GZIP)
            data = unpacker.decompress(path.read_bytes(), size + 1)
        except FileNotFoundError as error:
            raise HeatError(f"{where} is missing; the trace was not copied whole") from error
        except zlib.error as error:
            raise HeatError(f"{where} is damaged ({error})") from error
        if len(data) != size or not unpacker.eof:
            raise HeatError(f"{where} is truncated or of another size than the metadata says")
        rows = np.frombuffer(data, dtype=self.dtype.newbyteorder("<")).reshape(self.chunk, *self.tail)
        self._kept = (number, rows)
        return rows

    def _path(self, number: int) -> Path:
        return self.folder.joinpath("c", str(number), *["0"] * len(self.tail))


def read_metadata(folder: Path, node_type: str) -> dict[str, Any]:
    """The ``zarr.json`` of a group or array; raises ``HeatError`` where it is missing or none."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MOST_METADATA_BYTES))
    except OSError as error:
        raise HeatError(f"{folder.name}/{METADATA} cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise HeatError(f"{folder.name}/{METADATA} is not JSON, or truncated") from error
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise HeatError(f"{folder.name}/{METADATA} is not of Zarr format 3")
    if document.get("node_type") != node_type:
        raise HeatError(
            f"{folder.name}/{METADATA} describes {document.get('node_type')!r}, expected {node_type!r}"
        )
    return document


def write_metadata(folder: Path, document: dict[str, Any]) -> None:
    """Replace the ``zarr.json`` of a group or array in one step; raises ``OutputError``."""
    write_atomically(folder / METADATA, json.dumps(document, indent=1).encode())
