"""The one place that decides how kernels are compiled.

Sums may be reassociated and fused (they become SIMD), but infinities and NaN keep their meaning. Nothing in a
kernel depends on how many threads run, so one seed gives one answer. Kernels release the GIL and are cached on disk;
where no cache directory can be written they are compiled anew in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: Function) -> Function:
    """Compile ``function`` on first use, one thread."""
    return _compiled(function, parallel=False)


def parallel_kernel(function: Function) -> Function:
    """Compile ``function`` on first use; its ``prange`` loops are spread over numba's threads."""
    return _compiled(function, parallel=True)


def _compiled(function: Function, parallel: bool) -> Function:
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": _FASTMATH,
        "error_model": "numpy",
        "parallel": parallel,
    }
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:
        # numba found no directory for its cache; see NUMBA_CACHE_DIR.
        return cast(Function, numba.njit(**options)(function))
