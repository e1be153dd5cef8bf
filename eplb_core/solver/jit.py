"""The one place that decides how kernels are compiled.

Sums may be reassociated and fused (they become SIMD), but infinities and NaN keep their meaning. Nothing in a
kernel depends on how many threads run, so one seed gives one answer. Kernels release the GIL and are cached on
disk: beside the sources, or where these cannot be written to in numba's folder of the user's cache directory
(``$XDG_CACHE_HOME``); ``NUMBA_CACHE_DIR`` names another. Only where none can be written does each process compile.

A kernel's code is compiled again into each kernel that calls it, so what runs only a few times per layer is plain
Python that calls kernels. Kernels loop rather than have numpy assign, sum or compare whole arrays, of which each takes
up to two seconds to compile; and they give what they call one type for each argument.
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
    """Compile ``function`` on first use; it runs on one thread and lets others run Python meanwhile."""
    return _compiled(function, {})


def part(function: Function) -> Function:
    """A kernel that becomes part of those that call it: what takes 50 ns must not spend 50 more on being called.

    Its statements are put into theirs before they are compiled; it is compiled by itself only where Python calls it.
    """
    return _compiled(function, {"inline": "always"})


class _Listener(event.Listener):
    """Passes on each kernel of this package whose compilation begins; numba compiles parts of its own besides."""

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
    """Within it, ``report`` is called with the name of each kernel that begins to be compiled, one at a time.

    A kernel that is loaded from its cache is not compiled.
    """
    with event.install_listener("numba:compile", _Listener(report)):
        yield


def _compiled(function: Function, more: dict[str, Any]) -> Function:
    if getattr(numba.config, "DISABLE_JIT", False):
        return function
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": _FASTMATH,
        "error_model": "numpy",
        # Wrappers for callers in C, which there are none of, take time to compile.
        "no_cfunc_wrapper": True,
        **more,
    }
    try:
        dispatcher: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # numba found no directory for its cache; see NUMBA_CACHE_DIR.
        return cast(Function, numba.njit(**options)(function))
    cache_file: Any = dispatcher._cache._cache_file
    # A cached kernel holds the code of those that it calls, but numba stamps it with its own file alone.
    cache_file._source_stamp = _stamp()
    load_index = cache_file._load_index

    def load_index_of_today() -> dict[Any, str]:
        try:
            found: dict[Any, str] = load_index()
        except (AttributeError, ImportError):
            # Written by another version, whose types are no more.
            return {}
        return found

    cache_file._load_index = load_index_of_today
    return cast(Function, dispatcher)


@cache
def _stamp() -> str:
    """Fingerprint of this package's sources: an edit of any of them recompiles all kernels."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
