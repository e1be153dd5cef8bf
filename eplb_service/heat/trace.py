"""Heat traces on disk: numpy files with the tokens of each expert, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError, checked_heat

ARRAY_NAMES = ("heat", "counts")
"""Names under which an ``.npz`` may hold its heat, first match wins."""

Array = npt.NDArray[np.generic]
"""An array of any type, as a file holds it."""

_MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK"}


def read_heat(path: Path) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Heat of a trace file, int64 (float64 where fractional) ``[T, L, E]`` with at least one step.

    Reads ``.npz`` (array ``heat`` or ``counts``) and ``.npy``; never unpickles. Raises ``HeatError`` naming
    the file where it is missing, truncated, of another kind, or holds what cannot be heat.
    """
    try:
        heat_TLE = checked_heat(load_array(path, ARRAY_NAMES))
    except HeatError as error:
        raise HeatError(f"{path}: {error}") from error
    if heat_TLE.shape[0] == 0:
        raise HeatError(f"{path}: the trace holds no steps; record at least one")
    return heat_TLE


def load_array(path: Path, names: tuple[str, ...]) -> Array:
    """The array of an ``.npy``, or the first of ``names`` that an ``.npz`` holds.

    Raises ``HeatError`` (without the path, which callers put in front) where there is no such array to read.
    """
    if path.suffix not in _MAGIC:
        raise HeatError(f"expected a numpy file ending in .npz or .npy, got {path.suffix or 'no suffix'}")
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC[path.suffix])) != _MAGIC[path.suffix]:
                raise HeatError(f"is not a numpy {path.suffix} file, or its beginning is damaged")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else _first_of(loaded, names)
    except OSError as error:
        raise HeatError(f"cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise HeatError("claims an array larger than memory; it is damaged") from error
    except HeatError:
        raise
    except (ValueError, EOFError, BadZipFile, zlib.error, KeyError) as error:
        reason = " ".join(str(error).split())
        raise HeatError(f"is truncated or damaged, or holds no plain numbers ({reason})") from error


def _first_of(archive: Mapping[str, Array], names: tuple[str, ...]) -> Array:
    for name in names:
        if name in archive:
            return archive[name]
    found = ", ".join(archive) or "nothing"
    raise HeatError(f"holds no array named {' or '.join(map(repr, names))}; found {found}")
