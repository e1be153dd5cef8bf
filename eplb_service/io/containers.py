"""Size-limited readers for container files (numpy, torch and JSON). They never execute code from a file.

The readers return arrays, records or documents. Other modules interpret them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
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
"""An array of any type, as stored in a file."""
Record: TypeAlias = tuple[str, Mapping[str, Any]]
"""Location of a record, for error messages (such as ``line 3`` or ``entry 2``), and its content."""

_MAX_PICKLE_BYTES = 64 << 20
_PICKLE_PROTOCOL = 2
"""Pickle protocol of ``torch.save``, and the only one that ``torch.load`` can read without executing code."""
_OBJECT_BYTES = 96
"""Upper bound on the memory, in bytes, of the objects that one byte of a pickle can create."""
_MAX_EXPANSION = 2000
"""Maximum plausible ratio of a file's unpacked size to its packed size.

Deflate reaches 1,032 on zeros, and rows of counts stay far below that.
"""
_ALWAYS_ALLOWED_BYTES = 256 << 20
"""Unpacked size, in bytes, that is always accepted, however small the file is."""
_MAX_NUMBER = 1 << 62
_MAX_COUNT = np.iinfo(np.int32).max
_TORCH_GLOBALS = frozenset(
    {
        "torch._utils _rebuild_tensor_v2",
        "torch Size",
        "collections OrderedDict",
        *(
            f"torch {number}Storage"
            for number in (
                "Double",
                "Float",
                "Half",
                "BFloat16",
                "Long",
                "Int",
                "Short",
                "Char",
                "Byte",
                "Bool",
            )
        ),
    }
)
"""Globals that a pickle of tensors and plain containers may reference."""


@contextlib.contextmanager
def reporting_damage(expected: str) -> Iterator[None]:
    """Convert any error caused by a damaged file to a one-line ``HeatError``; ``OSError`` passes through.

    Parameters
    ----------
    expected
        Expected content, for the message "not a valid ...", such as ``tensor file``.
    """
    try:
        yield
    except (HeatError, OSError):
        raise
    except MemoryError as error:
        raise HeatError(
            "claims to hold more numbers than fit in memory; it is damaged, or must be converted piece by piece"
        ) from error
    except Exception as error:
        raise HeatError(f"is truncated, damaged, or not a valid {expected} ({one_line(error)})") from error


def require(package: str, content: str, extra: str) -> None:
    """Raise ``HeatError`` if a package cannot be imported. The message does not name the file.

    Parameters
    ----------
    package
        Import name of the package.
    content
        Kind of file that the package reads, including its article.
    extra
        Extra of eplb-service that installs the package.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise HeatError(
            f"is {content}, which needs {package}; install it with: {install_command(extra)} ({error})"
        ) from error


def read_npy(path: Path) -> Array:
    """Memory-map the array in an ``.npy`` file, so that slices are read on access. Raises ``HeatError``."""
    with reporting_damage("array of plain numbers"):
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def read_npy_bytes(content: bytes) -> Array:
    """Return the array encoded in the bytes of an ``.npy`` file. Raises ``HeatError``."""
    file = io.BytesIO(content)
    with reporting_damage("array of plain numbers"):
        major, _ = np.lib.format.read_magic(file)
        read_header = (
            np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(file)
        if math.prod(shape) * int(dtype.itemsize) > len(content):
            raise HeatError(f"claims to hold an array of shape {list(shape)}, which is larger than the file")
        file.seek(0)
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


def read_npz(path: Path) -> dict[str, Array]:
    """Return all arrays in an ``.npz`` file, keyed by name. Raises ``HeatError``."""
    with reporting_damage("array archive"), zipfile.ZipFile(path) as archive:
        if any(
            member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            for member in archive.infolist()
        ):
            raise HeatError(
                "uses a compression method that numpy and torch never use; it is damaged or hostile"
            )
        _check_unpacked_size(archive, path)
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name.removesuffix(".npy"): read_npy_bytes(archive.read(name)) for name in members}


def _check_unpacked_size(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ``HeatError`` if a zip archive unpacks to too many bytes."""
    check_fits_memory(sum(member.file_size for member in archive.infolist()), path.stat().st_size)


def check_fits_memory(claimed: int, packed: int | None = None) -> None:
    """Raise ``HeatError`` if a file claims more memory than is plausible.

    Parameters
    ----------
    claimed
        Memory needed to read the file, in bytes. It must not exceed the machine's memory.
    packed
        Size of the file in bytes. If given, ``claimed`` must also be a plausible unpacked size for it.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if claimed > memory:
        raise HeatError(
            f"claims to hold {claimed / 2**30:.0f} GiB of numbers, more than this machine's memory of "
            f"{memory / 2**30:.0f} GiB; it is damaged, or must be converted piece by piece"
        )
    if packed is not None and claimed > max(_ALWAYS_ALLOWED_BYTES, _MAX_EXPANSION * packed):
        raise HeatError(
            f"asks for {claimed / 2**30:.1f} GiB of memory, although it has only {packed} bytes; "
            "it is damaged or hostile"
        )


def one_line(error: Exception) -> str:
    """Return an error's message as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_torch(path: Path) -> Any:
    """Read a file that ``torch.save`` wrote, converting every tensor to a numpy array. Needs torch.

    The file may contain tensors, dictionaries, lists, tuples, numbers and strings. bfloat16 tensors become float32,
    because numpy has no bfloat16. Raises ``HeatError`` if the file is damaged, was written before torch 1.6, or
    contains any other object. The message does not name the path.
    """
    with reporting_damage("tensor file"):
        _check_torch_archive(path)
        require("torch", "a torch file", "torch")
        import torch

        # Without mmap, torch trusts the sizes in the pickle and reads past the end of a shorter storage.
        document = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
        check_fits_memory(_bytes_without_sharing(document, {}), path.stat().st_size)
        return _with_numpy_arrays(document)


def _check_torch_archive(path: Path) -> None:
    """Raise ``HeatError`` if a torch file needs more memory than its size justifies or has unsupported objects."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1 or archive.getinfo(pickles[0]).file_size > _MAX_PICKLE_BYTES:
            raise HeatError("is a zip archive but not a torch file: it has no data.pkl of at most 64 MiB")
        if len({name.lower() for name in names}) < len(names):
            raise HeatError("has two members with the same name; it is damaged or hostile")
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise HeatError("is compressed, which torch files never are; it is damaged or hostile")
        _check_unpacked_size(archive, path)
        program = archive.read(pickles[0])
    check_fits_memory(_OBJECT_BYTES * len(program))
    _check_pickle(program)


def _check_pickle(program: bytes) -> None:
    """Raise ``HeatError`` if a pickle builds anything other than tensors and plain containers.

    ``torch.load`` runs no code, but a pickle could still make it call ``bytearray(1 << 40)``, for example.
    """
    for operation, argument, _ in pickletools.genops(program):
        if operation.name == "PROTO" and argument != _PICKLE_PROTOCOL:
            raise HeatError(f"uses pickle protocol {argument}; save it with torch.save's default protocol")
        if operation.name == "GLOBAL" and argument not in _TORCH_GLOBALS:
            name = str(argument).replace(" ", ".")
            raise HeatError(f"refers to {name}; only tensors and plain containers are supported")
        # An empty set takes one byte in a pickle but 216 bytes in memory, more than _OBJECT_BYTES.
        if operation.name == "EMPTY_SET":
            raise HeatError("builds a set; only tensors and plain containers are supported")


def _bytes_without_sharing(value: Any, sizes: dict[int, int | None]) -> int:
    """Return the memory that the numbers in ``value`` would take if each shared object were copied.

    Building an array copies shared objects.

    A pickle of a few hundred bytes can describe far more data: lists can contain the same list many times, and a tensor
    can repeat one number.

    Parameters
    ----------
    value
        Content of a torch file, or a part of it.
    sizes
        Sizes of the containers visited so far, keyed by ``id``; ``None`` while a container is being visited.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if not isinstance(value, list | tuple | dict):
        return 8
    if id(value) not in sizes:
        sizes[id(value)] = None
        entries = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = sum(_bytes_without_sharing(entry, sizes) for entry in entries)
    size = sizes[id(value)]
    if size is None:
        raise HeatError("holds a container that contains itself; it is damaged or hostile")
    return size


def _with_numpy_arrays(value: Any) -> Any:
    """Copy the containers in ``value``, replacing each tensor with a numpy array."""
    import torch

    if isinstance(value, torch.Tensor):
        numbers = value.float() if value.dtype == torch.bfloat16 else value
        return numbers.detach().numpy().copy()
    if isinstance(value, dict):
        return {name: _with_numpy_arrays(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_numpy_arrays(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(_with_numpy_arrays(entry) for entry in value)
    return value


def files_of_ranks(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the per-rank files in a folder, keyed by rank. Raises ``HeatError`` if a rank's file is missing.

    Parameters
    ----------
    folder
        Folder with one file per rank.
    pattern
        File name with ``%d`` in place of the rank.
    """
    name_pattern = re.compile(re.escape(pattern).replace("%d", r"(\d+)"))
    files = {int(match[1]): file for file in folder.iterdir() if (match := name_pattern.fullmatch(file.name))}
    for rank in range(max(files, default=-1) + 1):
        if rank not in files:
            raise HeatError(
                f"has no {pattern % rank}; without it, that rank's tokens are missing from every step"
            )
    return dict(sorted(files.items()))


def check_covers_run(path: Path, pattern: str) -> None:
    """Raise ``HeatError`` if a file covers only one rank and its folder contains other ranks' files.

    Without this check, one rank's tokens could be mistaken for the tokens of the whole run.

    Parameters
    ----------
    path
        File to check.
    pattern
        Regular expression for the file names, with a group ``rank``.
    """
    match = re.fullmatch(pattern, path.name)
    if match is None:
        return
    siblings = (re.fullmatch(pattern, file.name) for file in path.parent.iterdir())
    other_ranks = sorted(sibling[0] for sibling in siblings if sibling and sibling["rank"] != match["rank"])
    if other_ranks:
        raise HeatError(
            f"has only rank {match['rank']}'s tokens, but {other_ranks[0]} is in the same folder: open the folder "
            "to read all ranks, or move the file to another folder to read this rank only"
        )


def read_json(path: Path) -> object:
    """Return the document in a ``.json`` file, or an iterator over the lines of a JSON Lines file with their locations.

    Raises ``HeatError`` if a document or a line is not JSON. The message does not name the path.
    """
    check_fits_memory(path.stat().st_size)
    content = path.read_bytes()
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return _lines(content)
        raise HeatError(f"is not JSON, or is truncated ({error})") from error
    except (ValueError, RecursionError) as error:
        raise HeatError(f"is not JSON, or holds a number that cannot be read ({error})") from error


def _lines(content: bytes) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = ""
            if not line.endswith(b"\n"):
                hint = "; if its writer was stopped in the middle of the line, remove the line"
            raise HeatError(f"line {number} is not JSON ({error}){hint}") from error


def records_of(document: object) -> Iterator[Record]:
    """Yield the records in the result of ``read_json``. Raises ``HeatError`` naming an entry that is not a record."""
    if isinstance(document, Iterator):
        entries = document
    else:
        contents = document if isinstance(document, list) else [document]
        entries = ((f"entry {index}", content) for index, content in enumerate(contents))
    for location, content in entries:
        if not isinstance(content, Mapping):
            raise HeatError(
                f"{location} is a {type(content).__name__}; expected records, or numbers in rows of equal length"
            )
        yield location, content


def whole_number(content: Mapping[Any, Any], name: str, location: str) -> int:
    """Return a non-negative integer field of a record. Raises ``HeatError`` if it is anything else."""
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_NUMBER:
        raise HeatError(f"{location} has {name} {value!r}; expected a non-negative integer")
    return value


def as_array(value: object) -> Array | None:
    """Return a nested list, a number or an array as an array of numbers, or ``None`` for anything else.

    Examples
    --------
    >>> as_array([[1, 2], [3, 4]])
    array([[1, 2],
           [3, 4]])
    >>> as_array([[1, 2], [3]]) is None
    True
    """
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
    value: object,
    name: str,
    location: str,
    axes: tuple[str, ...],
    minimum: int = 0,
    maximum: int = _MAX_COUNT,
) -> Array:
    """Return a field of a record as an array of integers. An empty list becomes an array without rows.

    Parameters
    ----------
    value
        Value of the field.
    name
        Name of the field, for error messages.
    location
        Location of the record, for error messages.
    axes
        Names of the expected axes.
    minimum
        Smallest valid number.
    maximum
        Largest valid number.

    Raises
    ------
    HeatError
        If the value is not an array of integers with these axes and bounds.
    """
    if isinstance(value, list) and not value:
        return np.zeros((0, *[1] * (len(axes) - 1)), dtype=np.int64)
    array = as_array(value)
    if array is None or array.ndim != len(axes) or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        content = "no numbers" if array is None else f"{array.dtype} of shape {list(array.shape)}"
        raise HeatError(
            f"{location} holds {content} as {name}; expected integers of shape [{', '.join(axes)}]"
        )
    if array.size and not (minimum <= array.min() and array.max() <= maximum):
        raise HeatError(
            f"{location} holds {name} from {array.min()} to {array.max()}; expected {minimum} to {maximum}"
        )
    return array
