"""Runs the layer solver over many layers, several at a time.

Layers are handed to threads, not to a parallel loop inside a kernel: kernels hold no lock, a layer that fails
spoils no other, the clock can be read between layers, and a process may fork or plan for several deployments at
once without harm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from eplb_service.solver.by_node import solve_by_node
from eplb_service.solver.candidates import annealed
from eplb_service.solver.decision import Answer, solve_layer
from eplb_service.solver.model import (
    FRESH,
    Bool,
    Deployed,
    Float64,
    Int32,
    Layer,
    SearchParams,
    heat_of,
    homes,
)
from eplb_service.solver.tables.locality import crossing_share, localised
from eplb_service.solver.time.decision import WindowHeat, solve_layer_for_time
from eplb_service.solver.time.evaluation import Curve

_POLISHING_TRIES = 32_000
"""Of annealing one layer before the clock is read again: a few milliseconds."""
_FRUITLESS_TURNS = 8
"""Turns over all layers that win nothing after which polishing ends; chosen by hand."""
_SEED_STRIDE = 1_000_003
"""Between the seeds of two turns; more than a model has layers."""


def polish(
    answers: dict[int, Answer],
    heat_of_layer: Callable[[int], Float64],
    deployed: Callable[[int], Deployed],
    params: SearchParams,
    deadline: float,
    run: Callable[..., Iterable[Answer | None]],
) -> dict[int, Answer]:
    """Better answers for the layers that were placed from scratch; the others are not touched.

    What is found depends on the machine, but never becomes
    worse with time.

    Parameters
    ----------
    answers
        By layer.
    heat_of_layer, deployed
        What a layer was solved for.
    params
        Those of the search; its seed is the first of all turns'.
    deadline
        On ``time.monotonic``.
    run
        ``map``, or a thread pool's.
    """
    best = {layer: answer for layer, answer in answers.items() if answer.taken == FRESH}
    fruitless = 0

    def go_on(layer: int, seed: int) -> Answer | None:
        if time.monotonic() >= deadline:
            return None
        try:
            return annealed_on(best[layer], heat_of_layer(layer), deployed(layer), params, seed)
        except Exception:  # what a layer has is good already; another try must cost nobody anything
            return None

    for turn in count(1):
        if not best or fruitless == _FRUITLESS_TURNS or time.monotonic() >= deadline:
            return best
        worst_first = sorted(best, key=lambda layer: -best[layer].found.par)
        seeds = [params.seed + turn * _SEED_STRIDE + layer for layer in worst_first]
        better = zip(worst_first, run(go_on, worst_first, seeds), strict=True)
        gained = {layer: answer for layer, answer in better if answer is not None}
        best |= gained
        fruitless = 0 if gained else fruitless + 1
    raise AssertionError("turns have no end")


def annealed_on(
    answer: Answer, heat_NE: Float64, deployed: Deployed, params: SearchParams, seed: int
) -> Answer | None:
    """A better answer for a layer after annealing on; ``None`` where they win nothing.

    Parameters
    ----------
    answer
        What was found so far.
    heat_NE, deployed
        float64 ``[N, E]`` the layer's heat by episode, and what serves now.
    params, seed
        Those of the search, and the seed of this turn in place of theirs.
    """
    layer = Layer(heat_of(heat_NE, deployed.phy2log_RS.shape[0]), deployed)
    found = annealed(answer.found, layer, params, _POLISHING_TRIES, seed)
    if found.par >= answer.found.par:
        return None
    found = localised(found, layer, params)
    crosses = crossing_share(found, layer, params.tables)
    fresh = min(answer.fresh, found, key=lambda candidate: candidate.par)
    return replace(answer, found=found, fresh=fresh, crosses=crosses)


class SolverError(RuntimeError):
    """What went wrong in one layer; the message is what the solver said."""


class OutOfTimeError(SolverError):
    """A layer whose turn had not come when the budget was spent."""


def solve_many(
    heat_LNE: Float64,
    deployed_LRS: Int32,
    deployed_LGE: Int32,
    share_LGE: npt.NDArray[np.floating],
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced_L: Bool,
    threads: int | None = None,
    budget_ms: float | None = None,
    node_R: Int32 | None = None,
    node_G: Int32 | None = None,
    expert_groups: int = 0,
    curve: Curve | None = None,
    steps_LNE: Float64 | None = None,
) -> list[Answer | SolverError]:
    """Solve all layers; without a budget the answers do not depend on ``threads`` (``None``: one per CPU).

    Parameters
    ----------
    heat_LNE
        float64 ``[L, N, E]``, tokens of each expert by episode.
    deployed_LRS, deployed_LGE, share_LGE
        What serves now: int32 ``[L, R, S]`` placements, int32 ``[L, G, E]`` tables and float ``[L, G, E]`` the part of
        each expert's tokens that each source group has.
    params, half_life_H, min_gain
        As for ``decision.solve_layer``, with one seed for all layers.
    unplaced_L
        bool ``[L]``, which layers are placed from scratch whatever it moves.
    threads
        Layers solved at a time.
    budget_ms
        Layers begin in the order given until it is spent; what is left of it improves layers that were placed from
        scratch, but for those in groups.
    node_R, node_G
        int32, as in ``model.Deployed``; one node where they are not given.
    expert_groups
        So many groups of experts each stay on one node, see ``by_node.solve_by_node``; 0 for none.
    curve, steps_LNE
        With both, the slowest rank's time is lowered on single steps, float64 ``[L, N', E]``, see ``time.decision``;
        groups are not kept together then, nor is a budget used up.

    Returns
    -------
    list of Answer or SolverError
        One for each layer: ``OutOfTimeError`` where the budget was spent, another ``SolverError`` where it failed.
    """
    deadline = np.inf if budget_ms is None else time.monotonic() + budget_ms / 1e3
    heat_LNE = np.ascontiguousarray(heat_LNE, dtype=np.float64)
    deployed = _deployed_by_layer(deployed_LRS, deployed_LGE, share_LGE, heat_LNE.shape[2], node_R, node_G)

    def solve(layer: int) -> Answer | SolverError:
        if time.monotonic() >= deadline:
            return OutOfTimeError(f"the budget of {budget_ms:g} ms was spent")
        # No two layers draw alike, and what one draws does not depend on which others are looked into.
        mine = params._replace(seed=params.seed + crc32(heat_LNE[layer]))
        place, unplaced = deployed(layer), bool(unplaced_L[layer])
        asked = heat_LNE[layer], place, mine, half_life_H, min_gain, unplaced
        try:
            if curve is not None and steps_LNE is not None:
                both = WindowHeat(heat_LNE[layer], np.ascontiguousarray(steps_LNE[layer], dtype=np.float64))
                return solve_layer_for_time(both, place, mine, curve, min_gain, unplaced, half_life_H)
            return solve_by_node(*asked, expert_groups) if expert_groups else solve_layer(*asked)
        except Exception as error:  # one layer's failure must not spoil the others
            return SolverError(f"{type(error).__name__}: {error}")

    layers = range(heat_LNE.shape[0])
    with _several(threads, len(layers)) as run:
        answers = list(run(solve, layers))
        if budget_ms is not None and not expert_groups and curve is None:
            solved = {layer: answer for layer, answer in enumerate(answers) if isinstance(answer, Answer)}
            better = polish(solved, heat_LNE.__getitem__, deployed, params, deadline, run)
            answers = [better.get(layer, answer) for layer, answer in enumerate(answers)]
    return answers


def _deployed_by_layer(
    deployed_LRS: Int32,
    deployed_LGE: Int32,
    share_LGE: npt.NDArray[np.floating],
    experts: int,
    node_R: Int32 | None,
    node_G: Int32 | None,
) -> Callable[[int], Deployed]:
    """What is deployed in each layer, as kernels take it."""
    deployed_LRS = np.array(deployed_LRS, dtype=np.int32, order="C")
    deployed_LGE = np.array(deployed_LGE, dtype=np.int32, order="C")
    share32_LGE = np.ascontiguousarray(share_LGE, dtype=np.float32)
    nodes = (
        np.zeros(deployed_LRS.shape[1], dtype=np.int32) if node_R is None else node_R,
        np.zeros(deployed_LGE.shape[1], dtype=np.int32) if node_G is None else node_G,
    )

    def deployed(layer: int) -> Deployed:
        home_ER = homes(deployed_LRS[layer], experts)
        return Deployed(deployed_LRS[layer], deployed_LGE[layer], share32_LGE[layer], home_ER, *nodes)

    return deployed


@contextmanager
def _several(threads: int | None, layers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A ``map`` that does as many layers at a time as wanted, at most one per CPU."""
    cpus = os.cpu_count() or 1
    wanted = min(threads or cpus, cpus, layers)
    if wanted <= 1:
        yield map
        return
    with ThreadPoolExecutor(wanted, thread_name_prefix="eplb-solver") as pool:
        yield pool.map
