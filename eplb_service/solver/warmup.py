"""Compiles every kernel (or loads it from numba's cache), so that no decision waits for a compiler.

numba compiles on one core, whatever threads ask. So helper processes, one for each further core and two at most, and
this one compile a share of the kernels each; what a helper compiles reaches this process through numba's cache. What it
leaves undone, because it could not be started or was killed, is compiled where it is called.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, get_args, get_origin, get_type_hints

import numba
import numpy as np

from eplb_service.placement import Placement
from eplb_service.solver.engine import solve_many
from eplb_service.solver.jit import compilations, compiled_elsewhere, is_cached
from eplb_service.solver.model import DEALT, EVEN, RULE, SOLVED, STEPWISE, SearchParams
from eplb_service.solver.topology import choose_senders
from eplb_service.solver.window import loads_of_ranks, served_window, sum_episodes

_WINDOW = ("window.served_window", "window.sum_episodes")
_HEAT_TYPES = ("int32", "int64", "float64")
"""Types of a window's heat, as the planner hands it over."""
_SCRATCH = (
    "construction.place",
    "evaluation.expert_heat",
    "construction._greedy_replicas",
    "model._normalise",
    "model.with_covariance",
    "model.homes",
    "evaluation.mean_of_max",
)
_PLACED = (
    "construction.even_shares",
    "topology.match_ranks",
    "topology.choose_senders",
    "topology.keep_slots",
    "tables.slots_by_expert",
    "tables.fixed_rule",
    "tables.slot_shares",
)
_SOLVED = (
    "tables.tables_par",
    "tables.rehoused",
    "tables.cool",
    "tables._spread_parts",
    "tables.swap_through_tables",
)
_DEALT = (
    "tables.rehoused",
    "dealing._trusted_shares",
    "dealing._deal_out",
    "dealing._cool_shares",
    "dealing._cool_by_two",
    "tables.swap_through_tables",
)
_STEPWISE = ("stepwise.expected_level", "step_search._step_search")
_TIME = (
    "time_costs.split_us",
    "time_costs.mean_slowest",
    "time_costs._replica_receivers",
    "time_costs._fill_cheaply",
    "time_costs.one_replica_each",
    "time_costs.even_tables",
    "time_costs.cool_tables",
)
_NODES = ("topology._crossing", "topology._localise_tables")
_TREE, _ANNEALING = ("construction._search_counts",), ("annealing.anneal",)
_SEARCH = ("construction.assignment_of", "local_search.local_search")
_FEWEST = 4
"""Kernels to compile for which a helper is started: it takes a second to be there."""
_MOST_HELPERS = 2
_ENOUGH_MS = 1e6
"""A budget that is never spent: it is there so that what budgets buy is compiled too."""


@cache
def warm_up(threads: int | None = None) -> None:
    """Solve a tiny problem by every path that the planner takes, once in a process; ``threads`` as for a decision."""
    precompile(_all_kernels())
    placement = Placement.linear(layers=2, experts=6, ranks=4, slots=2)
    tables_LGE = np.ascontiguousarray(placement.default_log2phy().transpose(1, 0, 2))
    heat_LNE = np.arange(2 * 4 * 6, dtype=np.float64).reshape(2, 4, 6)
    params = SearchParams(
        z=1.0,
        move_price=0.08,
        tree_leaves=1,
        local_search_steps=10,
        annealing_tries=10,
        step_tries=10,
    )
    two_nodes = np.array([0, 0, 1, 1], dtype=np.int32)
    curve_4 = np.array([1.0, 2.0, 1.0, 0.1])
    ways = [(tables, 1, None) for tables in (EVEN, RULE, SOLVED, STEPWISE)]
    for tables, width, time in (*ways, (DEALT, 2, None), (EVEN, 1, curve_4), (SOLVED, 1, curve_4)):
        answers = solve_many(
            heat_LNE,
            placement.phy2log_LRS,
            np.repeat(tables_LGE, width, axis=1),
            np.full((2, 4 * width, 6), 0.25 / width),
            params._replace(tables=tables, width=width),
            np.array([np.inf, 2.0]),
            0.0,
            np.array([False, True]),
            threads,
            budget_ms=_ENOUGH_MS,
            node_R=two_nodes,
            node_G=np.repeat(two_nodes, width),
            curve_4=time,
            steps_LNE=heat_LNE,
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
    whole_TLE = np.ones((2, 2, 6), dtype=np.int64)
    for heat_TLE in (whole_TLE.astype(np.int32), whole_TLE, whole_TLE.astype(np.float64)):
        loads_of_ranks(heat_TLE, placement.phy2log_LRS.copy(), np.ones((2, 8)))
        served_window(heat_TLE, np.arange(2), placement.phy2log_LRS.copy(), np.ones((2, 8)), 2)
        sum_episodes(heat_TLE, np.arange(2), 2)
    deployed_RS = np.array(placement.phy2log_LRS[0])
    choose_senders(deployed_RS, deployed_RS[::-1].copy(), np.zeros(4, dtype=np.int32))


def kernels_of(params: SearchParams, heat_type: str, *, fitted: bool = False) -> list[str]:
    """Names of the kernels that placing layers from scratch runs.

    Kernels that only kernels call come with those; what is missing is compiled when it is first called.

    Parameters
    ----------
    params
        How the layers are searched.
    heat_type
        Type of the window's heat: int32, int64 or float64.
    fitted
        Whether a cost curve is planned for.
    """
    by_split = {SOLVED: _SOLVED, DEALT: _DEALT, STEPWISE: _STEPWISE}
    return [
        *(f"{name}:{heat_type}" for name in _WINDOW),
        *(_TREE if params.tree_leaves else ()),
        *_SCRATCH,
        *_PLACED,
        *(_TIME if fitted else ()),
        *by_split.get(params.tables, ()),
        *(_ANNEALING if params.annealing_tries else ()),
        *(_SEARCH if params.local_search_steps else ()),
    ]


def _all_kernels() -> list[str]:
    window = [f"{name}:{heat}" for heat in _HEAT_TYPES for name in (*_WINDOW, "window.loads_of_ranks")]
    search = (_TREE, _SCRATCH, _PLACED, _SOLVED, _NODES, _ANNEALING, _STEPWISE, _TIME, _DEALT, _SEARCH)
    return window + list(dict.fromkeys(name for names in search for name in names))


def precompile(names: Sequence[str]) -> None:
    """Compile kernels by name unless they are cached, in several processes.

    Where there is one core, no folder to cache in, or little to compile, nothing is done: kernels are compiled as they
    are called. Whatever fails here shows there.
    """
    helpers = min(_cores() - 1, _MOST_HELPERS)
    missing = [name for name in names if is_cached(*_kernel_and_types(name)) is False]
    if helpers < 1 or len(missing) < _FEWEST or not sys.executable:
        return
    mine, *others = (missing[at :: helpers + 1] for at in range(helpers + 1))
    with contextlib.ExitStack() as stack:
        started = []
        for share in others:
            with contextlib.suppress(OSError):
                started.append(stack.enter_context(_start(share)))
                # Whatever ends this, no helper goes on.
                stack.callback(started[-1].wait)
                stack.callback(started[-1].kill)
        for name in mine:
            _compile(name)
        for helper in started:
            for line in helper.stdout or ():
                compiled_elsewhere(line.rstrip("\n"))


@cache
def _kernel_and_types(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A kernel, named like ``window.sum_episodes:int32``, and the numba types that it is compiled for.

    Types are those of its annotations, with as many dimensions as an argument's name has letters.
    """
    path, _, heat_type = name.partition(":")
    module, _, function = path.partition(".")
    kernel = getattr(import_module(f"{__package__}.{module}"), function)
    hints = get_type_hints(getattr(kernel, "py_func", kernel))
    hints.pop("return", None)
    given = (_example(argument, hint, heat_type) for argument, hint in hints.items())
    return kernel, tuple(map(numba.typeof, given))


def _example(argument: str, hint: Any, heat_type: str) -> Any:
    """Return a value of an argument's type: empty arrays are as good as any."""
    if hint in (int, float, bool):
        return hint()
    if hasattr(hint, "_fields"):
        return hint(*(_example(field, kind, heat_type) for field, kind in get_type_hints(hint).items()))
    if get_origin(hint) is np.ndarray:
        (item,) = get_args(get_args(hint)[1])
    else:
        item = np.dtype(heat_type)
    found = re.search(r"_([A-Z0-9]+)$", argument)
    dimensions = sum(letter.isalpha() for letter in found[1]) or 1 if found else 1
    return np.empty((0,) * dimensions, dtype=item)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(names: Sequence[str]) -> subprocess.Popen[str]:
    """Start a helper, which imports what this process does, and nothing from the folder that it happens to run in."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _help; _help(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", program, *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _help(names: Sequence[str]) -> None:
    """Compile kernels and name those that are begun on stdout: a helper's work."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # numba or a library of its may print: only what is meant for the parent gets there.
    answers, sys.stdout = sys.stdout, sys.stderr
    with compilations(lambda kernel: print(kernel, file=answers, flush=True)):
        for name in names:
            _compile(name)


def _compile(name: str) -> None:
    # Whoever calls the kernel sees the error.
    with contextlib.suppress(Exception):
        kernel, types = _kernel_and_types(name)
        kernel.compile(types)
