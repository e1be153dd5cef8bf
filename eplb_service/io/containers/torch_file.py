"""Reads ``.pt`` files without torch and without running what they say: numbers in, numpy out.

A ``.pt`` is a zip of raw storages and a pickle that says which tensor is made of which. A pickle is a program, so only
the few opcodes and names that plain containers and tensors need are understood here; any other ends in a refusal before
anything is built.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array, check_fits_memory

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
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))


def read_torch(path: Path) -> Any:
    """What ``torch.save`` wrote: dicts, lists, numbers and text, each tensor as a numpy array.

    Raises
    ------
    HeatError
        Without the path, which callers put in front: where the file is damaged, older than torch 1.6, or asks
        for anything but tensors and plain containers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
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
    except HeatError:
        raise
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OverflowError) as error:
        raise HeatError(f"is truncated or damaged ({' '.join(str(error).split())})") from error
    except (
        pickle.UnpicklingError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as error:
        raise HeatError(f"holds no tensors that can be read ({' '.join(str(error).split())})") from error


def _check_program(program: bytes) -> None:
    """Raise ``HeatError`` on an operation that plain containers of tensors do not need."""
    for operation, argument, _ in pickletools.genops(program):
        if operation.name in _REFUSED_OPCODES:
            raise HeatError(
                f"asks to build an object ({operation.name}); only tensors and plain containers are read"
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
    """What stands for ``torch.FloatStorage`` and its like."""

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
        """What a global name of the pickle stands for; raises ``HeatError`` on any that is not a tensor's."""
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
                raise HeatError(
                    f"has a storage of {numbers.size} bytes where {count} {kind.name[:-7]}s were announced"
                )
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
        raise HeatError(
            f"describes a tensor of {list(size)} beyond the {storage.numbers.size} numbers that are there"
        )
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
