"""Containers of arrays or records, whatever these mean: numpy, torch and JSON files, bounded in size and never run.

A ``.pt`` is a zip of raw storages and a pickle that says which tensor is made of which. It is read without torch: a
pickle is a program, so only the few opcodes and names that plain containers and tensors need are understood; any other
ends in a refusal before anything is built.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError

Array = npt.NDArray[Any]
"""An array of any type, as a file holds it."""
Record: TypeAlias = tuple[str, Mapping[str, Any]]
"""One record, and where it is, for messages: ``line 3``, ``entry 2``."""

_MOST_TEXT_BYTES = 4 << 30
_MOST_PICKLE_BYTES = 64 << 20
_MOST_DIMENSIONS = 8
_TYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "<?",
}
_REFUSED_OPCODES = frozenset(
    {
        *("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "EXT2", "EXT4", "PERSID", "STACK_GLOBAL"),
        *("NEXT_BUFFER", "READONLY_BUFFER"),
    }
)
_NOT_PLAIN = (
    LookupError,
    ValueError,
    EOFError,
    TypeError,
    AttributeError,
    pickle.UnpicklingError,
    SyntaxError,
    TokenError,
)
"""Errors of numpy and pickle on damaged headers and programs; numpy parses its headers as Python."""
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))


@contextlib.contextmanager
def _refusing(otherwise: str) -> Iterator[None]:
    """Within it, whatever a damaged file raises ends in a ``HeatError`` of one line, without the path."""
    try:
        yield
    except HeatError:
        raise
    except MemoryError as error:
        raise HeatError(
            "claims an array larger than memory; it is damaged, or to be converted elsewhere"
        ) from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OverflowError) as error:
        raise HeatError(f"is truncated or damaged ({one_line(error)})") from error
    except _NOT_PLAIN as error:
        raise HeatError(f"is truncated or damaged, or {otherwise} ({one_line(error)})") from error


def read_npy(path: Path) -> Array:
    """The array of an ``.npy``, mapped: slices are read when they are asked for; raises ``HeatError``."""
    with _refusing("holds no plain numbers"):
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def read_npy_bytes(content: bytes) -> Array:
    """The array of an ``.npy`` in memory; raises ``HeatError``."""
    file = io.BytesIO(content)
    with _refusing("holds no plain numbers"):
        if _claimed_bytes(file) > len(content):
            raise HeatError("claims more numbers than are there")
        file.seek(0)
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an ``.npz`` by name; raises ``HeatError``."""
    with _refusing("holds no plain numbers"), zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        claimed = 0
        for name in members:
            with archive.open(name) as file:
                claimed += _claimed_bytes(file)
        check_fits_memory(claimed)
        arrays = {}
        for name in members:
            with archive.open(name) as file:
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
        return arrays


def check_fits_memory(claimed: int) -> None:
    """Raise ``HeatError`` where a file claims more bytes than this machine has memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if claimed > memory:
        raise HeatError(
            f"claims {claimed / 2**30:.0f} GiB of numbers, more than this machine's memory of "
            f"{memory / 2**30:.0f} GiB; it is damaged, or must be converted in parts"
        )


def _claimed_bytes(file: IO[bytes]) -> int:
    major, _ = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    return math.prod(shape) * int(dtype.itemsize)


def one_line(error: Exception) -> str:
    """Return an error's text as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_torch(path: Path) -> Any:
    """Objects that ``torch.save`` wrote: dicts, lists, numbers and text, each tensor as a numpy array.

    Raises ``HeatError``, without the path, where the file is damaged, older than torch 1.6, or asks for anything but
    tensors and plain containers.
    """
    with _refusing("holds no tensors that can be read"), zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise HeatError("is a zip without the data.pkl of a torch file")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise HeatError("was written on a big-endian machine, which is not read")
        if archive.getinfo(pickles[0]).file_size > _MOST_PICKLE_BYTES:
            raise HeatError("has a data.pkl of more than 64 MiB; a recording has its numbers in tensors")
        check_fits_memory(sum(member.file_size for member in archive.infolist()))
        program = archive.read(pickles[0])
        _check_program(program)
        return _Reader(program, archive, folder).load()


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


class _Storage:
    """The raw numbers of a tensor; ``dtype`` is that of numpy, bfloat16 still as its bits."""

    def __init__(self, kind: str, numbers: Array) -> None:
        self.kind = kind
        self.numbers = numbers


class _StorageKind:
    """Placeholder for ``torch.FloatStorage`` and its like."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Reader(pickle.Unpickler):
    """Resolves the names of ``find_class`` and no other."""

    def __init__(self, program: bytes, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(program), encoding="utf-8")
        self._archive = archive
        self._folder = folder
        self._storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global name of the pickle; raises ``HeatError`` on any that is not a tensor's."""
        if module == "torch" and name in _TYPES:
            return _StorageKind(name)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch", "Size"):
            return tuple
        raise HeatError(f"asks for {module}.{name}; only tensors and plain containers are read")

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor names."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise HeatError("names a storage in a way that torch does not")
        _, kind, key, _, count = pid
        if not isinstance(kind, _StorageKind) or not isinstance(key, str) or not key.isdecimal():
            raise HeatError("names a storage in a way that torch does not")
        if key not in self._storages:
            numbers = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), dtype=np.uint8)
            dtype = np.dtype(_TYPES[kind.name])
            if numbers.size < count * dtype.itemsize:
                raise HeatError(f"has a storage of {numbers.size} bytes for {count} {kind.name[:-7]}s")
            self._storages[key] = _Storage(kind.name, numbers[: count * dtype.itemsize].view(dtype))
        return self._storages[key]


def _tensor(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Array:
    """The array that a tensor's offset, size and strides (in elements) cut out of its storage, as a copy."""
    if not isinstance(storage, _Storage) or len(size) != len(stride) or len(size) > _MOST_DIMENSIONS:
        raise HeatError("describes a tensor in a way that torch does not")
    if min((offset, *size, *stride), default=0) < 0:
        raise HeatError("describes a tensor with negative sizes")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and last >= storage.numbers.size:
        raise HeatError(f"describes a tensor {list(size)} beyond the {storage.numbers.size} numbers there")
    check_fits_memory(int(np.prod(size, dtype=np.float64)) * storage.numbers.itemsize)
    bytes_stride = [step * storage.numbers.itemsize for step in stride]
    if 0 in size:
        return np.zeros(size, dtype=storage.numbers.dtype)
    view: Array = np.lib.stride_tricks.as_strided(
        storage.numbers[offset:], size, bytes_stride, writeable=False
    )
    if storage.kind == "BFloat16Storage":
        bits: Array = view.astype(np.uint32) << np.uint32(16)
        numbers: Array = bits.view(np.float32)
        return numbers
    copied: Array = view.copy()
    return copied


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
    """The document of a ``.json``; raises ``HeatError`` (without the path) where it is none."""
    check_size(path)
    try:
        return json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise HeatError(f"is not JSON, or truncated ({error})") from error
    except ValueError as error:
        raise HeatError(f"holds a number that cannot be read ({error})") from error


def check_size(path: Path) -> None:
    """Raise ``HeatError`` where a text file is too large to be read."""
    if path.stat().st_size > _MOST_TEXT_BYTES:
        raise HeatError(f"is {path.stat().st_size / 2**30:.0f} GiB of text; convert it to .npy first")


def holds_lines(path: Path) -> bool:
    """Return whether a text file holds a JSON object on its first line, and more after it."""
    check_size(path)
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
        if not first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") or not any(line.strip() for line in file):
            return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a file; raises ``HeatError`` (without the path) naming the line that is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                cut = (
                    ""
                    if line.endswith(b"\n")
                    else ": is it cut off, because its writer was stopped? remove it"
                )
                raise HeatError(f"line {number} is not JSON{cut or f' ({error})'}") from error
            yield _record(f"line {number}", content)


def _record(place: str, content: object) -> Record:
    if not isinstance(content, Mapping):
        raise HeatError(f"{place} holds a {type(content).__name__}; expected an object")
    return place, content
