"""Kernels stay within their arrays, are never loaded from older sources, and need no directory to be cached in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

from eplb_service.solver import jit
from eplb_service.solver.replicas import greedy_copies


def add(a: int, b: int) -> int:
    return a + b


def test_without_a_cache_directory_kernels_still_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = numba.njit

    def njit(**options: object) -> object:
        if options.get("cache"):

            def refuse(_function: object) -> object:
                raise RuntimeError("cannot cache function: no locator available")

            return refuse
        return honest(**options)

    monkeypatch.setattr(jit, "numba", SimpleNamespace(njit=njit))
    assert jit.kernel(add)(2, 3) == 5


def test_a_cached_kernel_is_tied_to_all_sources() -> None:
    stamp = greedy_copies._cache._cache_file._source_stamp
    assert stamp == jit._sources()


@pytest.mark.timeout(900)
def test_no_kernel_leaves_its_arrays(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    run = "from eplb_service.solver.warmup import warm_up; warm_up(threads=1)"
    done = subprocess.run(
        [sys.executable, "-c", run], env=environment, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stderr
