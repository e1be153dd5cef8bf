"""Containers of arrays or records, whatever these mean: numpy, torch and JSON files, bounded in size and never run.

A ``.pt`` is a zip of raw storages and a pickle that says which tensor is made of which. It is read without torch: a
pickle is a program, so only the few opcodes and names that plain containers and tensors need are understood; any other
ends in a refusal before anything is built.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core.extras import install_command
from eplb_core.heat.window import HeatError

Array = npt.NDArray[Any]
"""An array of any type, as a file holds it."""
Record: TypeAlias = tuple[str, Mapping[str, Any]]
"""One record, and where it is, for messages: ``line 3``, ``entry 2``."""

_MAX_PICKLE_BYTES = 64 << 20
_OBJECT_BYTES = 96
"""Memory of the largest object that one byte of a pickle makes."""
_PACKED_AT_MOST = 2000
"""Bytes that one byte of a file may unpack to: deflate gives 1,032 zeros, and counts in rows are far below."""
_UNPACKED_ANYWAY = 256 << 20
_MAX_DIMENSIONS = 8
_MAX_NUMBER = 1 << 62
_MAX_COUNT = np.iinfo(np.int32).max
_BFLOAT16 = np.dtype("V2")
"""Stands for bfloat16, which numpy lacks."""
_TYPES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": _BFLOAT16,
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("<i1"),
    "ByteStorage": np.dtype("<u1"),
    "BoolStorage": np.dtype("<?"),
}
_REFUSED_OPCODES = frozenset(
    {
        *("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "EXT2", "EXT4", "PERSID", "STACK_GLOBAL"),
        *("NEXT_BUFFER", "READONLY_BUFFER", "EMPTY_SET", "FROZENSET", "BYTEARRAY8"),
    }
)
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))


@contextlib.contextmanager
def refusing(expected: str) -> Iterator[None]:
    """Within it, whatever a damaged file raises ends in a ``HeatError`` of one line that says what was ``expected``.

    Errors of the system, such as of a file that is not there, pass.
    """
    try:
        yield
    except (HeatError, OSError):
        raise
    except MemoryError as error:
        raise HeatError(
            "claims more numbers than fit into memory; it is damaged, or to be converted in parts"
        ) from error
    except Exception as error:
        raise HeatError(f"is truncated or damaged, or no {expected} ({one_line(error)})") from error


def require(package: str, what: str, extra: str) -> None:
    """Raise ``HeatError`` (without a path) where a package that reads ``what`` cannot be imported."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise HeatError(
            f"is {what}, for which {package} is needed: {install_command(extra)} ({error})"
        ) from error


def read_npy(path: Path) -> Array:
    """The array of an ``.npy``, mapped: slices are read when they are asked for; raises ``HeatError``."""
    with refusing("array of plain numbers"):
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def read_npy_bytes(content: bytes) -> Array:
    """The array of an ``.npy`` in memory; raises ``HeatError``."""
    file = io.BytesIO(content)
    with refusing("array of plain numbers"):
        major, _ = np.lib.format.read_magic(file)
        read_header = (
            np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(file)
        if math.prod(shape) * int(dtype.itemsize) > len(content):
            raise HeatError(f"claims {list(shape)} numbers, more than are there")
        file.seek(0)
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an ``.npz`` by name; raises ``HeatError``."""
    with refusing("archive of arrays"), zipfile.ZipFile(path) as archive:
        _check_members(archive, path)
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name.removesuffix(".npy"): read_npy_bytes(archive.read(name)) for name in members}


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ``HeatError`` where members of a zip unpack to too much, or without a bound."""
    members = archive.infolist()
    if any(one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for one in members):
        raise HeatError("is compressed in a way that neither numpy nor torch uses; it is damaged or hostile")
    check_fits_memory(sum(one.file_size for one in members), path.stat().st_size)


def check_fits_memory(claimed: int, packed: int | None = None) -> None:
    """Raise ``HeatError`` where a file claims more bytes than this machine has, or ``packed`` bytes could mean."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if claimed > memory:
        raise HeatError(
            f"claims {claimed / 2**30:.0f} GiB of numbers, more than this machine's memory of "
            f"{memory / 2**30:.0f} GiB; it is damaged, or must be converted in parts"
        )
    if packed is not None and claimed > max(_UNPACKED_ANYWAY, _PACKED_AT_MOST * packed):
        raise HeatError(
            f"asks for {claimed / 2**30:.1f} GiB of memory, though it has {packed} bytes; it is damaged or hostile"
        )


def one_line(error: Exception) -> str:
    """Return an error's text as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_torch(path: Path) -> Any:
    """Objects that ``torch.save`` wrote: dicts, lists, numbers and text, each tensor as a numpy array.

    Raises ``HeatError``, without the path, where the file is damaged, older than torch 1.6, or asks for anything but
    tensors and plain containers.
    """
    with refusing("file of tensors"), zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1 or archive.getinfo(pickles[0]).file_size > _MAX_PICKLE_BYTES:
            raise HeatError("is a zip without the data.pkl of a torch file, of up to 64 MiB")
        _check_members(archive, path)
        packed = path.stat().st_size
        check_fits_memory(_OBJECT_BYTES * archive.getinfo(pickles[0]).file_size, packed)
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise HeatError("was written on a big-endian machine, which is not read")
        program = archive.read(pickles[0])
        _check_program(program)
        document = _Reader(program, archive, folder, packed).load()
        check_fits_memory(_unshared_bytes(document, {}), packed)
        return document


def _unshared_bytes(value: Any, sizes: dict[int, int | None]) -> int:
    """Return the memory of the numbers in ``value`` were nothing of it shared, as an array of it would take it.

    A pickle of a few hundred bytes names one list many times over in others. ``sizes`` are of containers seen so far.
    """
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if not isinstance(value, list | tuple | dict):
        return 8
    if id(value) not in sizes:
        sizes[id(value)] = None
        parts = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = sum(_unshared_bytes(part, sizes) for part in parts)
    size = sizes[id(value)]
    if size is None:
        raise HeatError("holds a container that holds itself; it is damaged or hostile")
    return size


def _check_program(program: bytes) -> None:
    """Raise ``HeatError`` on an operation that plain containers of tensors do not need."""
    for operation, argument, _ in pickletools.genops(program):
        if operation.name in _REFUSED_OPCODES:
            raise HeatError(
                f"asks to build an object ({operation.name}); only tensors and containers are read"
            )
        # A reader sets aside as much memory as the highest number in a put asks for.
        if operation.name in _PUTS and int(argument or 0) > len(program):
            raise HeatError("remembers more values than it has; it is damaged or hostile")


class _Reader(pickle.Unpickler):
    """Resolves the names of ``find_class`` and no other; a storage is the flat array of its numbers."""

    def __init__(self, program: bytes, archive: zipfile.ZipFile, folder: str, packed: int) -> None:
        super().__init__(io.BytesIO(program), encoding="utf-8")
        self._archive = archive
        self._folder = folder
        self._packed, self._unpacked = packed, 0
        self._storages: dict[str, Array] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global name of the pickle; raises ``HeatError`` on any that is not a tensor's."""
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("collections", "OrderedDict"): dict,
            ("torch", "Size"): tuple,
            **{("torch", storage): dtype for storage, dtype in _TYPES.items()},
        }
        if (module, name) not in known:
            raise HeatError(f"asks for {module}.{name}; only tensors and plain containers are read")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Array:
        """The storage that a tensor names."""
        word, dtype, key, _, count = pid
        if (
            word != "storage"
            or not isinstance(dtype, np.dtype)
            or not isinstance(key, str)
            or not key.isdecimal()
        ):
            raise HeatError("names a storage in a way that torch does not")
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            if dtype is _BFLOAT16:
                bits = np.frombuffer(data, "<u2", count)
                self._storages[key] = (bits.astype("<u4") << np.uint32(16)).view("<f4")
            else:
                self._storages[key] = np.frombuffer(data, dtype, count)
        return self._storages[key]

    def _tensor(self, storage: Array, offset: int, size: tuple[int, ...], *more: Any) -> Array:
        """The tensor of a storage, where all of them so far are not too much: strides of 0 make much of little."""
        tensor = _view(storage, offset, size, *more)
        self._unpacked += tensor.nbytes
        check_fits_memory(self._unpacked, self._packed)
        copied: Array = tensor.copy()
        return copied


def _view(storage: Array, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Array:
    """The array that a tensor's offset, size and strides (in elements) cut out of its storage."""
    numbers = (offset, *size, *stride)
    # Numbers of numpy would overflow, and the bounds below with them.
    if not all(type(number) is int and number >= 0 for number in numbers) or len(size) > _MAX_DIMENSIONS:
        raise HeatError(
            f"describes a tensor by {numbers}; torch does so by an offset, sizes and strides from 0 on"
        )
    if not isinstance(storage, np.ndarray) or storage.ndim != 1:
        raise HeatError("describes a tensor without a storage")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and last >= storage.size:
        raise HeatError(f"describes a tensor {list(size)} beyond the {storage.size} numbers there")
    if 0 in size:
        return np.zeros(size, dtype=storage.dtype)
    bytes_stride = [step * storage.itemsize for step in stride]
    view: Array = np.lib.stride_tricks.as_strided(storage[offset:], size, bytes_stride, writeable=False)
    return view


def files_of_ranks(folder: Path, pattern: str) -> dict[int, Path]:
    """Files of a folder by their rank, the ``%d`` of ``pattern``; raises ``HeatError`` where one is missing."""
    whole = re.compile(re.escape(pattern).replace("%d", r"(\d+)"))
    files = {int(match[1]): file for file in folder.iterdir() if (match := whole.fullmatch(file.name))}
    for rank in range(max(files, default=-1) + 1):
        if rank not in files:
            raise HeatError(f"lacks {pattern % rank}; without it its tokens would be missing in every step")
    return dict(sorted(files.items()))


def check_alone(path: Path, pattern: str) -> None:
    """Raise ``HeatError`` where a file is one rank's of several: it would be read as the whole run."""
    own = re.fullmatch(pattern, path.name)
    matches = (re.fullmatch(pattern, other.name) for other in path.parent.iterdir()) if own else ()
    others = sorted(match[0] for match in matches if own and match and match["rank"] != own["rank"])
    if own and others:
        raise HeatError(
            f"is the share of rank {own['rank']} alone, and {others[0]} is beside it: open the folder for all ranks, "
            "or put the file elsewhere to read this rank alone"
        )


def read_json(path: Path) -> object:
    """The document of a ``.json``, or the lines of JSON Lines, as an iterator of them and where they are.

    Raises ``HeatError`` (without the path) where a document, or a line, is none.
    """
    check_fits_memory(path.stat().st_size)
    content = path.read_bytes()
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return _lines(content)
        raise HeatError(f"is not JSON, or truncated ({error})") from error
    except (ValueError, RecursionError) as error:
        raise HeatError(f"is not JSON, or holds a number that cannot be read ({error})") from error


def _lines(content: bytes) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else "; is it cut off, because its writer was stopped? remove it"
            raise HeatError(f"line {number} is not JSON ({error}){cut}") from error


def records_of(document: object) -> Iterator[Record]:
    """The records of what ``read_json`` returned, one or several; raises ``HeatError`` naming what is none."""
    alone = document if isinstance(document, list) else [document]
    entries = (
        document if isinstance(document, Iterator) else ((f"entry {at}", one) for at, one in enumerate(alone))
    )
    for place, content in entries:
        if not isinstance(content, Mapping):
            raise HeatError(
                f"{place} is a {type(content).__name__}; expected records, or numbers in rows of one length"
            )
        yield place, content


def whole_number(content: Mapping[Any, Any], name: str, place: str) -> int:
    """A number from 0 on of a record at ``place``; raises ``HeatError`` where it is none."""
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_NUMBER:
        raise HeatError(f"{place} has the {name} {value!r}; expected a number from 0 on")
    return value


def as_array(value: object) -> Array | None:
    """A nested list, number or array as an array of numbers; ``None`` for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "iuf" else None


def counts_of(
    value: object, name: str, place: str, axes: tuple[str, ...], least: int = 0, most: int = _MAX_COUNT
) -> Array:
    """Whole numbers from ``least`` to ``most``, of such ``axes``; an empty list is none of them.

    Raises ``HeatError`` where ``value``, called ``name`` in the record at ``place``, is nothing of the kind.
    """
    if isinstance(value, list) and not value:
        return np.zeros((0, *[1] * (len(axes) - 1)), dtype=np.int64)
    array = as_array(value)
    if array is None or array.ndim != len(axes) or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        found = "no numbers" if array is None else f"{array.dtype} {list(array.shape)}"
        raise HeatError(f"{place} holds {found} as {name}; expected whole numbers [{', '.join(axes)}]")
    if array.size and not (least <= array.min() and array.max() <= most):
        raise HeatError(
            f"{place} holds {name} from {array.min()} to {array.max()}; expected {least} to {most}"
        )
    return array
