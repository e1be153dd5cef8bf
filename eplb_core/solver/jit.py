"""Numba settings for all solver kernels, and the kernels' on-disk cache.

Floating-point sums may be reassociated and fused so that they compile to SIMD code, but infinities and NaN are handled
as usual. Results do not depend on the number of threads, so the same seed always gives the same result.

Kernels release the GIL and are cached on disk, next to the sources if that directory is writable and otherwise in
numba's subdirectory of the user's cache directory (``$XDG_CACHE_HOME``). Set ``NUMBA_CACHE_DIR`` to use a different
directory. If no directory is writable, every process recompiles the kernels.

Three rules keep compile times low:

- Code that runs only a few times per layer is plain Python that calls kernels. If a kernel called these kernels
  instead, numba would compile them again as part of it.
- Kernels use loops instead of whole-array assignments, sums and comparisons, which take numba up to two seconds each to
  compile.
- Callers always pass the same type for a given kernel argument, because numba compiles a separate version for each
  type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: Function) -> Function:
    """Return a kernel that numba compiles on its first call. It runs on one thread and releases the GIL."""
    return _compile(function, {})


def part(function: Function) -> Function:
    """Return a kernel that numba inlines into the kernels that call it.

    Use it for functions that take only about 50 ns, because a call would add another 50 ns. Numba inlines the
    function's body before it compiles the caller. The function gets its own compiled version only if Python calls it
    directly.

    In a hot loop, pass individual arrays instead of named tuples, because numba updates the reference count of every
    array in a tuple at each inlined call. If every part took ``annealing._State``, annealing would take 1.5 times as
    long.
    """
    return _compile(function, {"inline": "always"})


class _Listener(event.Listener):
    """Listener that reports each kernel of this package when its compilation starts.

    Functions outside this package, which numba compiles as well, are not reported.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith(f"{__package__}."):
            self._report(f"{function.__module__.removeprefix(f'{__package__}.')}.{function.__name__}")

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def compilations(report: Callable[[str], None]) -> Iterator[None]:
    """Report the kernels that are compiled inside the ``with`` block.

    Kernels that are loaded from the cache are not reported.

    Parameters
    ----------
    report
        Function called when the compilation of a kernel starts, with the kernel's name, such as ``swaps.best_swap``.
        Numba compiles one kernel at a time.
    """
    with event.install_listener("numba:compile", _Listener(report)):
        yield


def _compile(function: Function, extra_options: dict[str, Any]) -> Function:
    if getattr(numba.config, "DISABLE_JIT", False):
        return function
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": _FASTMATH,
        "error_model": "numpy",
        # A wrapper for C callers takes time to compile, and no C code calls these kernels.
        "no_cfunc_wrapper": True,
        **extra_options,
    }
    try:
        dispatcher: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Numba has no writable directory for its cache; see NUMBA_CACHE_DIR.
        return cast(Function, numba.njit(**options)(function))
    cache_file: Any = dispatcher._cache._cache_file
    # A cached kernel contains the code of the kernels that it calls, but numba's stamp covers only the kernel's own
    # file.
    cache_file._source_stamp = _stamp()
    load_index = cache_file._load_index

    def load_readable_index() -> dict[Any, str]:
        try:
            index: dict[Any, str] = load_index()
        except (AttributeError, ImportError):
            # A different version of this package wrote the index, with types that no longer exist.
            return {}
        return index

    cache_file._load_index = load_readable_index
    return cast(Function, dispatcher)


@cache
def _stamp() -> str:
    """Return a hash of this package's source files. Editing any of them recompiles all kernels."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
