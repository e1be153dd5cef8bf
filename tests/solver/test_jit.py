"""Kernels stay within their arrays, are never loaded from older sources, and need no directory to be cached in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from eplb_service.solver import jit
from eplb_service.solver.construction import _greedy_replicas
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


def test_a_cached_kernel_is_stamped_with_the_sources_of_its_module() -> None:
    assert _greedy_replicas._cache._cache_file._source_stamp == jit._stamp_of("construction")


def test_a_cache_of_another_version_is_taken_for_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of_another_version(_file: object) -> object:
        raise AttributeError("Can't get attribute 'Demand' on module 'eplb_service.solver.model'")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", of_another_version)
    monkeypatch.setattr(add, "__module__", "eplb_service.solver.model")
    kernel = jit.kernel(add)
    assert jit.is_cached(kernel, (numba.int64, numba.int64)) is False
    assert kernel(2, 3) == 5


IMPORTS = {"top": "middle", "middle": "bottom", "bottom": "jit", "apart": "jit"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three modules in a row, ``top`` above ``middle`` above ``bottom``, and ``apart``."""
    for name, imported in IMPORTS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(f"import numpy\n\nfrom eplb_service.solver.{imported} import kernel\n")
    (tmp_path / "jit.py").write_text("how = 1\n")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    jit._source.cache_clear()
    yield tmp_path
    jit._source.cache_clear()


@pytest.mark.parametrize(
    ("edited", "recompiled"),
    [
        ("top", {"top"}),
        ("middle", {"top", "middle"}),
        ("bottom", {"top", "middle", "bottom"}),
        ("apart", {"apart"}),
        ("jit", set(IMPORTS)),
    ],
)
def test_an_edit_recompiles_what_depends_on_it_and_nothing_else(
    package: Path, edited: str, recompiled: set[str]
) -> None:
    before = {name: jit._stamp_of.__wrapped__(name) for name in IMPORTS}
    with (package / f"{edited}.py").open("a") as file:
        file.write("# another line\n")
    jit._source.cache_clear()
    after = {name: jit._stamp_of.__wrapped__(name) for name in IMPORTS}
    assert {name for name in IMPORTS if before[name] != after[name]} == recompiled


def test_modules_of_kernels_import_each_other_by_name_alone() -> None:
    """A stamp is found from lines ``from eplb_service.solver.MODULE import``: no other form may reach a kernel."""
    root = Path(jit.__file__).parent
    for path in root.rglob("*.py"):
        for line in path.read_text().splitlines():
            if "eplb_service.solver" in line and "import" in line.split("#")[0].split():
                imported = re.match(r"from eplb_service\.solver\.([\w.]+) import ", line)
                assert imported, f"{path.relative_to(root)}: {line}"
                module = root.joinpath(*imported[1].split(".")).with_suffix(".py")
                assert module.is_file(), f"{path.relative_to(root)}: {line} names a package"


def test_an_edit_of_the_search_recompiles_the_tables_but_not_the_window() -> None:
    reached = {name: jit._reached_from(name) for name in ("tables", "time_costs", "window")}
    assert {"construction", "evaluation", "model", "jit"} <= reached["tables"]
    assert {"tables", "evaluation"} <= reached["time_costs"]
    assert reached["window"] == {"window", "model", "jit"}


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
