"""Kernels stay within their arrays, are never loaded from older sources, and need no directory to be cached in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from eplb_core.solver import jit
from eplb_core.solver.construction import _greedy_replicas
from tests.solver.plain_kernels import from_zero_on, guarded


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

    monkeypatch.setattr(jit, "numba", SimpleNamespace(njit=njit, config=numba.config))
    assert jit.kernel(add)(2, 3) == 5


def test_a_cached_kernel_is_stamped_with_all_sources() -> None:
    assert _greedy_replicas._cache._cache_file._source_stamp == jit._stamp()


def test_a_cache_of_another_version_is_taken_for_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of_another_version(_file: object) -> object:
        raise AttributeError("Can't get attribute 'Demand' on module 'eplb_core.solver.model'")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", of_another_version)
    monkeypatch.setattr(add, "__module__", "eplb_core.solver.model")
    kernel = jit.kernel(add)
    assert kernel(2, 3) == 5


def test_an_edit_of_any_source_recompiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "search.py"
    source.write_text("effort = 1\n")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    before = jit._stamp.__wrapped__()
    assert jit._stamp.__wrapped__() == before
    source.write_text("effort = 2\n")
    assert jit._stamp.__wrapped__() != before


def run_apart(*program: str, **environment: str) -> int:
    """Number that a program, as the interpreter takes it, prints last in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


_DECISION = """
import numpy as np
from eplb_core.heat.window import Window
from eplb_core.planner.decide import plan
from eplb_core.solver import candidates, layer, warmup, window
from tests.planner.first_layout import FIRST, FOUND, HEAT, SETTINGS, TOPOLOGY
warmup.warm_up(1)
kernels = [one for room in (candidates, layer, window) for one in vars(room).values() if hasattr(one, "signatures")]
before = [len(one.signatures) for one in kernels]
plan(Window(np.tile(HEAT, (2, 1, 1))), FIRST, FOUND.log2phy_RLE, TOPOLOGY, SETTINGS)
print(sum(len(one.signatures) for one in kernels) - sum(before))
"""


def test_a_decision_compiles_nothing_once_the_solver_is_warm() -> None:
    assert run_apart("-c", _DECISION) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_kernel_leaves_its_arrays(tmp_path: Path) -> None:
    """Compiled with bounds checking: catches indices past the end, whatever the types make of them."""
    changed = run_apart(
        "-m", "tests.solver.awkward_plans", NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path)
    )
    assert changed > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_index_of_a_kernel_wraps_round() -> None:
    """Uncompiled, every index watched: catches negative ones, which bounds checking lets through."""
    assert run_apart("-m", "tests.solver.plain_kernels") > 10


def test_watched_indices_are_refused_where_they_are_negative() -> None:
    source = "def last(a, i):\n    return a[i], a[-1], a[1:i], a[i, 0] if a.ndim > 1 else 0\n"
    space = {"_from_zero_on": from_zero_on}
    exec(compile(guarded(source), "kernel", "exec"), space)
    assert space["last"](np.arange(4), 2)[:2] == (2, 3)
    with pytest.raises(IndexError, match="wraps round"):
        space["last"](np.arange(4), np.int32(-1))
    with pytest.raises(IndexError, match="wraps round"):
        from_zero_on(np.array([0, -2]))
