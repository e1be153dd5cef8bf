"""The one place that decides how kernels are compiled.

Sums may be reassociated and fused (they become SIMD), but infinities and NaN keep their meaning. Nothing in a
kernel depends on how many threads run, so one seed gives one answer. Kernels release the GIL and are cached on
disk; where no cache directory can be written they are compiled anew in each process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: Function) -> Function:
    """Compile ``function`` on first use; it runs on one thread and lets others run Python meanwhile."""
    return _compiled(function, {})


def part(function: Function) -> Function:
    """A kernel that becomes part of those that call it: what takes 50 ns must not spend 50 more on being called."""
    return _compiled(function, {"forceinline": True})


def _compiled(function: Function, more: dict[str, Any]) -> Function:
    if getattr(numba.config, "DISABLE_JIT", False):
        return function
    options: dict[str, Any] = {"nogil": True, "fastmath": _FASTMATH, "error_model": "numpy", **more}
    try:
        dispatcher: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # numba found no directory for its cache; see NUMBA_CACHE_DIR.
        return cast(Function, numba.njit(**options)(function))
    # A cached kernel holds the code of those that it calls, but numba looks only at its own file's age.
    dispatcher._cache._cache_file._source_stamp = _sources()
    return cast(Function, dispatcher)


@cache
def _sources() -> str:
    """Fingerprint of all kernels' sources."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
