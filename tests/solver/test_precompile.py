"""Kernels are compiled by several processes at once, of the types that they are called with; no helper is relied on."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from eplb_service.placement import Placement
from eplb_service.planner.request import search_params_of
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver import warmup as module
from eplb_service.solver.jit import compilations, is_cached
from eplb_service.solver.model import SearchParams
from eplb_service.solver.warmup import _HEAT_TYPES, _all_kernels, _kernel_and_types, kernels_of, warm_up
from tests.solver.test_jit import run_apart

IDLE = [sys.executable, "-c", "import sys; sys.stdin.read()"]
KERNELS = [
    "model.homes",
    "tables.fixed_rule",
    "construction.even_shares",
    "topology.keep_slots",
]


def test_kernels_are_listed_with_the_types_that_they_are_called_with() -> None:
    warm_up(1)
    assert len(_all_kernels()) > 40
    for name in _all_kernels():
        kernel, types = _kernel_and_types(name)
        if name.endswith(("place", "assignment_of")):
            continue  # warming up takes paths on which other kernels call them
        assert types in kernel.overloads, name


@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
def test_a_search_is_listed_by_what_its_settings_run(split: str) -> None:
    settings = PlannerSettings(split=split)
    width = settings.deal_width if split == "deal" else 1
    params = search_params_of(settings, Placement.linear(1, 32, 8, 5), width)
    names = kernels_of(params, "int64")
    assert set(names) <= set(_all_kernels())
    assert len(names) == len(set(names))
    assert ("tables.cool" in names) == (split == "tables")
    assert ("dealing._deal_out" in names) == (split == "deal")
    assert ("step_search._step_search" in names) == (split == "step")
    assert not any(name.startswith("time_") for name in names)


def test_what_is_not_searched_is_not_compiled() -> None:
    greedy = kernels_of(SearchParams(), _HEAT_TYPES[0], fitted=True)
    assert not {"construction._search_counts", "annealing.anneal"} & set(greedy)
    assert "local_search.local_search" not in greedy
    assert "time_costs.cool_tables" in greedy
    annealed = kernels_of(SearchParams(annealing_tries=1, tree_leaves=2), _HEAT_TYPES[0])
    assert {"construction._search_counts", "annealing.anneal"} <= set(annealed)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process compiles; nothing is cached, and there are two cores."""
    here: list[str] = []
    monkeypatch.setattr(module, "_compile", here.append)
    monkeypatch.setattr(module, "is_cached", lambda *_: False)
    monkeypatch.setattr(module, "_cores", lambda: 2)
    return here


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Helpers that take what they are given and answer nothing, in place of real ones."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(IDLE, text=True, **pipes))
        return processes[-1]

    monkeypatch.setattr(module, "_start", start)
    return processes


def test_an_interrupt_leaves_no_helper_behind(
    compiled: list[str], started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.precompile(KERNELS)
    assert [process.returncode is not None for process in started] == [True]


def test_a_helper_that_dies_leaves_its_kernel_to_this_process(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> subprocess.Popen[str]:
        dead = [sys.executable, "-c", "input()"]
        return subprocess.Popen(dead, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(module, "_start", start)
    left = deque(KERNELS)
    with module._helped(left, 1):
        pass
    assert sorted(left) == sorted(KERNELS)


def test_without_a_second_process_all_is_compiled_here(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> subprocess.Popen[str]:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(module, "_start", refuse)
    module.precompile(KERNELS)
    assert compiled == KERNELS


@pytest.mark.parametrize(
    ("cores", "names", "cached"),
    [(1, KERNELS, False), (2, KERNELS[:3], False), (2, KERNELS, True), (2, KERNELS, None)],
    ids=["one core", "little to compile", "cached", "no folder to cache in"],
)
def test_no_helper_is_started_where_it_could_not_help(
    compiled: list[str],
    started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    names: list[str],
    cached: bool | None,
) -> None:
    monkeypatch.setattr(module, "_cores", lambda: cores)
    monkeypatch.setattr(module, "is_cached", lambda *_: cached)
    module.precompile(names)
    assert (compiled, started) == ([], [])


def test_a_helper_gets_kernels_from_the_end_and_what_it_compiles_is_reported() -> None:
    said = "model.homes\nconstruction.put\ndone\ndone\n"
    helper = SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO(said))
    left, seen = deque(["first", "second"]), []
    with compilations(seen.append):
        module._feed(helper, left)
    assert helper.stdin.getvalue() == "second\nfirst\n"
    assert seen == ["model.homes", "construction.put"]
    assert not left


def test_a_helper_compiles_what_it_is_given_and_survives_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    helper = module._start()
    answers, _ = helper.communicate("no.such.kernel\ntables.fixed_rule\n", timeout=100)
    assert answers.splitlines() == ["done", "tables.fixed_rule", "done"]
    assert helper.returncode == 0
    assert [path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")] == ["tables.fixed_rule"]


def test_cached_kernels_are_known_without_loading_them() -> None:
    warm_up(1)
    assert is_cached(*_kernel_and_types("model.homes")) is True
    assert is_cached(_kernel_and_types("model.homes")[0], ()) is False
    assert is_cached(lambda: None, ()) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_all_that_is_listed_warming_up_compiles_nothing_more(tmp_path: Path) -> None:
    assert run_apart("tests.solver.cold_start", NUMBA_CACHE_DIR=str(tmp_path)) == 0
