"""Arrays of numpy files, checked before they take memory: never unpickled, never larger than this machine."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError

Array = npt.NDArray[Any]
"""An array of any type, as a file holds it."""

_REFUSALS = (ValueError, EOFError, OverflowError, SyntaxError, TokenError)
"""What numpy raises on a damaged header, which it parses as Python."""


def read_npy(path: Path) -> Array:
    """The array of an ``.npy``, mapped: slices are read when they are asked for.

    Raises
    ------
    HeatError
        Without the path, which callers put in front: where it is damaged or holds no numbers.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (*_REFUSALS, MemoryError) as error:
        raise HeatError(f"is truncated or damaged, or holds no plain numbers ({_line(error)})") from error


def read_npy_bytes(content: bytes) -> Array:
    """The array of an ``.npy`` in memory; raises ``HeatError`` as ``read_npy`` does."""
    file = io.BytesIO(content)
    try:
        if _claimed_bytes(file) > len(content):
            raise HeatError("claims more numbers than are there")
        file.seek(0)
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    except _REFUSALS as error:
        raise HeatError(f"is truncated or damaged, or holds no plain numbers ({_line(error)})") from error
    return array


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an ``.npz`` by name; raises ``HeatError`` as ``read_npy`` does."""
    try:
        with zipfile.ZipFile(path) as archive:
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
    except HeatError:
        raise
    except MemoryError as error:
        raise HeatError(
            "claims an array larger than memory; it is damaged, or must be converted elsewhere"
        ) from error
    except (*_REFUSALS, KeyError, NotImplementedError, RuntimeError) as error:
        raise HeatError(f"is truncated or damaged, or holds no plain numbers ({_line(error)})") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise HeatError(f"is truncated or damaged ({_line(error)})") from error


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


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
