"""Kernels stay within their arrays, ignore caches of older sources, and work without a cache directory."""

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
from tests.solver.plain_kernels import checked_index, guarded


def add(a: int, b: int) -> int:
    return a + b


def test_kernels_compile_even_if_there_is_no_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    original = numba.njit

    def njit(**options: object) -> object:
        if options.get("cache"):

            def refuse(_function: object) -> object:
                raise RuntimeError("cannot cache function: no locator available")

            return refuse
        return original(**options)

    monkeypatch.setattr(jit, "numba", SimpleNamespace(njit=njit, config=numba.config))
    assert jit.kernel(add)(2, 3) == 5


def test_a_cached_kernel_is_stamped_with_all_sources() -> None:
    assert _greedy_replicas._cache._cache_file._source_stamp == jit._stamp()


def test_a_cache_from_a_different_version_counts_as_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of_another_version(_file: object) -> object:
        raise AttributeError("Can't get attribute 'Demand' on module 'eplb_core.solver.model'")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", of_another_version)
    monkeypatch.setattr(add, "__module__", "eplb_core.solver.model")
    kernel = jit.kernel(add)
    assert kernel(2, 3) == 5


def test_editing_any_source_triggers_recompilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "search.py"
    source.write_text("effort = 1\n")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    before = jit._stamp.__wrapped__()
    assert jit._stamp.__wrapped__() == before
    source.write_text("effort = 2\n")
    assert jit._stamp.__wrapped__() != before


def run_process(*program: str, **environment: str) -> int:
    """Run Python with these arguments in a separate process, and return the number on the last line of its output."""
    process = subprocess.run(
        [sys.executable, "-W", "error", *program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return int(process.stdout.splitlines()[-1])


_DECISION = """
import numpy as np
from eplb_core.heat.window import Window
from eplb_core.planner.decide import plan
from eplb_core.solver import candidates, layer, warmup, window
from tests.planner.first_layout import FIRST, FOUND, HEAT, SETTINGS, TOPOLOGY
warmup.warm_up(1)
values = [value for module in (candidates, layer, window) for value in vars(module).values()]
kernels = [value for value in values if hasattr(value, "signatures")]
before = [len(kernel.signatures) for kernel in kernels]
plan(Window(np.tile(HEAT, (2, 1, 1))), FIRST, FOUND.log2phy_RLE, TOPOLOGY, SETTINGS)
print(sum(len(kernel.signatures) for kernel in kernels) - sum(before))
"""


def test_a_decision_compiles_no_kernel_after_the_warm_up() -> None:
    assert run_process("-c", _DECISION) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_stay_within_their_arrays(tmp_path: Path) -> None:
    """Numba's bounds checking catches indices beyond the end."""
    changed = run_process(
        "-m", "tests.solver.awkward_plans", NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path)
    )
    assert changed > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernel_indices_never_wrap_around() -> None:
    """The uncompiled run catches negative indices, which bounds checking accepts."""
    assert run_process("-m", "tests.solver.plain_kernels") > 10


def test_the_guard_rejects_negative_indices() -> None:
    source = "def last(a, i):\n    return a[i], a[-1], a[1:i], a[i, 0] if a.ndim > 1 else 0\n"
    space = {"_checked_index": checked_index}
    exec(compile(guarded(source), "kernel", "exec"), space)
    assert space["last"](np.arange(4), 2)[:2] == (2, 3)
    with pytest.raises(IndexError, match="wraps around"):
        space["last"](np.arange(4), np.int32(-1))
    with pytest.raises(IndexError, match="wraps around"):
        checked_index(np.array([0, -2]))
