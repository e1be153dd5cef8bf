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
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
_IMPORTED = re.compile(rb"^from eplb_service\.solver\.(\w+) import", flags=re.MULTILINE)


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
        self._report, self._lock = report, Lock()

    def report(self, kernel: str) -> None:
        with self._lock:
            self._report(kernel)

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith(f"{__package__}."):
            self.report(f"{_module_of(function)}.{function.__name__}")

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def compilations(report: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``report`` is called with the name of each kernel that begins to be compiled.

    A kernel that is loaded from its cache is not compiled. Calls come from whatever thread compiles, one at a time.
    """
    listener = _Listener(report)
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    _listening.append(listener)
    try:
        yield
    finally:
        _listening.remove(listener)
        event.unregister("numba:compile", listener)  # type: ignore[no-untyped-call]


_listening: list[_Listener] = []


def compiled_elsewhere(kernel: str) -> None:
    """Report a kernel whose compilation has begun in another process, to whoever asked for ``compilations``."""
    for listener in tuple(_listening):
        listener.report(kernel)


def is_cached(dispatcher: Any, types: tuple[Any, ...]) -> bool | None:
    """Return whether a kernel is compiled for these types, here or on disk; ``None`` where nothing is cached.

    That is without a folder for numba's cache, and where kernels are not compiled at all.
    """
    cache: Any = getattr(dispatcher, "_cache", None)
    if not hasattr(cache, "_cache_file"):
        return None
    if types in dispatcher.overloads:
        return True
    key = cache._index_key(types, dispatcher.targetctx.codegen())
    return key in cache._cache_file._load_index()


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
    cache_file._source_stamp = _stamp_of(_module_of(function))
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


def _module_of(function: Callable[..., Any]) -> str:
    """Name of a function's module within this package, like ``construction``."""
    return function.__module__.removeprefix(f"{__package__}.")


@cache
def _stamp_of(module: str) -> str:
    """Fingerprint of the sources that the kernels of a module, like ``construction``, are compiled from.

    They are the module's own and those of all modules of this package that it reaches through its imports, so that an
    edit recompiles what it may change and nothing else.
    """
    digest = hashlib.blake2b(digest_size=16)
    for reached in sorted(_reached_from(module)):
        digest.update(_source(reached))
    return digest.hexdigest()


def _reached_from(module: str) -> set[str]:
    # How kernels are compiled is part of each.
    reached, ahead = {"jit"}, [module]
    while ahead:
        found = ahead.pop()
        if found not in reached:
            reached.add(found)
            ahead += [name.decode() for name in _IMPORTED.findall(_source(found))]
    return reached


@cache
def _source(module: str) -> bytes:
    return Path(__file__).with_name(f"{module}.py").read_bytes()
