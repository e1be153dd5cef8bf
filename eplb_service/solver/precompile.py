"""Compiles kernels in several processes at once: the first command after installing waits about half as long.

numba compiles on one core, whatever threads ask. So helper processes, one for each further core and two at most, take
kernels from one end of a list while this process takes them from the other; what they compile reaches this process
through numba's cache. What a helper leaves undone, because it could not be started or was killed, is compiled here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from eplb_service.solver.jit import compilations, compiled_elsewhere, is_cached
from eplb_service.solver.kernel_list import entry

_FEWEST = 4
"""Kernels to compile for which a helper is started: it takes a second to be there."""
_MOST_HELPERS = 2
_DONE = "done"


def precompile(names: Sequence[str]) -> None:
    """Compile these kernels of ``kernel_list`` unless they are cached.

    Where there is one core, no folder to cache in, or little to compile, nothing is done: kernels are compiled as they
    are called. Whatever fails here shows there.
    """
    helpers = min(_cores() - 1, _MOST_HELPERS)
    missing = [name for name in names if is_cached(*entry(name)) is False]
    if helpers < 1 or len(missing) < _FEWEST or not sys.executable:
        return
    left = deque(missing)
    with _helped(left, helpers):
        while left:
            with contextlib.suppress(IndexError):
                _compile(left.popleft())


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _helped(left: deque[str], helpers: int) -> Iterator[None]:
    """Within it, helpers take names from the end of ``left``; it ends once they are done, or at once in an error."""
    started: list[subprocess.Popen[str]] = []
    feeders: list[threading.Thread] = []
    try:
        for _ in range(helpers):
            # Without a helper, this process compiles all.
            with contextlib.suppress(OSError):
                started.append(_start())
        for helper in started:
            feeders.append(threading.Thread(target=_feed, args=(helper, left), daemon=True))
            feeders[-1].start()
        yield
        for feeder in feeders:
            feeder.join()
    finally:
        for helper in started:
            helper.kill()
            helper.wait()
        for feeder in feeders:
            feeder.join()
        for helper in started:
            for pipe in (helper.stdin, helper.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _start() -> subprocess.Popen[str]:
    # Imports what this process does, and nothing from the folder that it happens to run in.
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _feed(helper: subprocess.Popen[str], left: deque[str]) -> None:
    """Have a helper compile one kernel after another, until none is left or the helper is gone."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    while left:
        try:
            name = left.pop()
        except IndexError:
            return
        try:
            helper.stdin.write(f"{name}\n")
            helper.stdin.flush()
        except OSError:
            left.append(name)
            return
        for line in helper.stdout:
            if line.rstrip("\n") == _DONE:
                break
            compiled_elsewhere(line.rstrip("\n"))
        else:
            left.append(name)
            return


def serve() -> None:
    """What a helper does: compiles the kernels named on stdin, names those that it begins with on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # numba or a library of its may print: only what is meant for the parent gets there.
    answers, sys.stdout = sys.stdout, sys.stderr
    with compilations(lambda kernel: print(kernel, file=answers, flush=True)):
        for line in sys.stdin:
            _compile(line.rstrip("\n"))
            print(_DONE, file=answers, flush=True)


def _compile(name: str) -> None:
    # Whoever calls the kernel sees the error.
    with contextlib.suppress(Exception):
        kernel, types = entry(name)
        kernel.compile(types)
