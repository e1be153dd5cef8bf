"""Kernels are compiled by several processes at once, of the types that they are called with; no helper is relied on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eplb_service.placement import Placement
from eplb_service.planner.request import search_params_of
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver import warmup as module
from eplb_service.solver.jit import compilations, is_cached
from eplb_service.solver.model import SearchParams
from eplb_service.solver.warmup import _HEAT_TYPES, _all_kernels, _kernel_and_types, kernels_of, warm_up
from tests.solver.test_jit import run_apart

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


def helped_by(program: str, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Helpers that run another program in place of real ones, as they are started."""
    started: list[subprocess.Popen[str]] = []

    def start(_names: list[str]) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(module, "_start", start)
    return started


def test_an_interrupt_leaves_no_helper_behind(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    started = helped_by("import time; time.sleep(600)", monkeypatch)
    monkeypatch.setattr(module, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.precompile(KERNELS)
    assert [process.returncode is not None for process in started] == [True]


def test_each_compiles_a_share_and_what_a_helper_begins_is_reported_even_if_it_dies(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    helped_by("print('construction.even_shares', flush=True); raise SystemExit(3)", monkeypatch)
    seen: list[str] = []
    with compilations(seen.append):
        module.precompile(KERNELS)
    assert compiled == KERNELS[::2]
    assert seen == ["construction.even_shares"]


def test_where_no_helper_can_be_started_this_process_compiles_its_share(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_names: list[str]) -> subprocess.Popen[str]:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(module, "_start", refuse)
    module.precompile(KERNELS)
    assert compiled == KERNELS[::2]


@pytest.mark.parametrize(
    ("cores", "names", "cached"),
    [(1, KERNELS, False), (2, KERNELS[:3], False), (2, KERNELS, True), (2, KERNELS, None)],
    ids=["one core", "little to compile", "cached", "no folder to cache in"],
)
def test_no_helper_is_started_where_it_could_not_help(
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    names: list[str],
    cached: bool | None,
) -> None:
    started = helped_by("", monkeypatch)
    monkeypatch.setattr(module, "_cores", lambda: cores)
    monkeypatch.setattr(module, "is_cached", lambda *_: cached)
    module.precompile(names)
    assert (compiled, started) == ([], [])


def test_a_helper_compiles_what_it_is_given_and_survives_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    helper = module._start(["no.such.kernel", "tables.fixed_rule"])
    answers, _ = helper.communicate(timeout=100)
    assert answers.splitlines() == ["tables.fixed_rule"]
    assert helper.returncode == 0
    assert [path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")] == ["tables.fixed_rule"]


def test_cached_kernels_are_known_without_loading_them() -> None:
    warm_up(1)
    assert is_cached(*_kernel_and_types("model.homes")) is True
    assert is_cached(_kernel_and_types("model.homes")[0], ()) is False
    assert is_cached(lambda: None, ()) is None


COLD_START = """
from eplb_service.solver import jit, warmup
warmup.precompile(warmup._all_kernels())
late = []
with jit.compilations(late.append):
    warmup.warm_up(1)
print(*late, len(late), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_all_that_is_listed_warming_up_compiles_nothing_more(tmp_path: Path) -> None:
    assert run_apart("-c", COLD_START, NUMBA_CACHE_DIR=str(tmp_path)) == 0
