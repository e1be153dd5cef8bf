"""Shared experts as SGLang's Waterfill sends them, beside splits of routed ones: which rank computes how much of both.

Waterfill makes the shared expert of a token one more choice, of a rank that has room: drawn among the token's own rank
and those that it goes to anyway, or among all where none is above the mean, with chances as the room below the mean
(less by a tenth away from home). Room is reckoned of the rank's own routed tokens, or of all ranks' after an
all-reduce. With fewer than 64 tokens on a rank it sends none away. Written from ``sglang/srt/layers/moe/waterfill.py``
and its kernel in SGLang 0.5.23; where that takes a hash of the token, chances are drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.split.quality import FOR_EVEN, FOR_STEPS, LPLB, PLACEMENTS, RANDOM, STEPWISE
from eplb_service.bench.scoring import peak_to_average
from eplb_service.offline import solve
from eplb_service.solver.stepwise.slots import slots_by_step
from worker_agent.moe.stepwise import StepwiseSplit

AT_HOME, BY_OWN_COUNTS, BY_ALL_COUNTS = WAYS = (
    "shared experts at home",
    "Waterfill by own counts",
    "Waterfill by all ranks' counts",
)
FEWEST_TOKENS = 64
"""On a rank, below which nothing is sent away."""
_HOME, _AWAY = 11, 10


@dataclass(frozen=True)
class Drawn:
    """Steps of tokens that choose distinct experts by a popularity that stays; lognormal as half of ``generate``'s."""

    experts: int
    tokens: int
    choices: int
    seed: int

    def steps(self, steps: int, part: int) -> Iterator[np.ndarray]:
        """Experts of each token, int64 ``[T, K]``; other steps in each part."""
        log_E = np.random.default_rng([self.seed]).normal(0, 0.9, self.experts)
        generator = np.random.default_rng([self.seed, part])
        for _ in range(steps):
            keys_TE = log_E + generator.gumbel(size=(self.tokens, self.experts))
            yield np.argpartition(-keys_TE, self.choices, axis=1)[:, : self.choices]


def shared_and_routed(
    drawn: Drawn, ranks: int, slots: int, window: int, steps: int
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Placement, split of routed experts, and under each of ``WAYS`` the ratio of ranks' routed and shared tokens."""
    seen_TE = np.stack([np.bincount(ids.ravel(), minlength=drawn.experts) for ids in drawn.steps(window, 0)])
    source_T = np.arange(drawn.tokens) % ranks
    for name in (FOR_EVEN, FOR_STEPS):
        placed_RS = solve(seen_TE[:, None], ranks, slots, **PLACEMENTS[name]).phy2log[0]
        split = StepwiseSplit(placed_RS, drawn.experts)
        generator = np.random.default_rng(drawn.seed)
        loads: dict[tuple[str, str], list[np.ndarray]] = {}
        for ids_TK in drawn.steps(steps, 1):
            heat_E = np.bincount(ids_TK.ravel(), minlength=drawn.experts)
            best_P = slots_by_step(heat_E[None, None], placed_RS[None], False)[0, 0]
            even_P = (heat_E / np.bincount(placed_RS.ravel()))[placed_RS].ravel()
            physical = {
                RANDOM: drawn_slots(ids_TK, even_P, placed_RS, generator),
                LPLB: drawn_slots(ids_TK, best_P, placed_RS, generator),
                STEPWISE: split.split(torch.from_numpy(ids_TK), None).numpy(),
            }
            for routed, slot_TK in physical.items():
                for way in WAYS:
                    work_R = work_of_ranks(slot_TK // slots, source_T, ranks, way, generator)
                    loads.setdefault((routed, way), []).append(work_R)
        for routed in physical:
            yield name, routed, {way: float(peak_to_average(np.stack(loads[routed, way]))) for way in WAYS}


def drawn_slots(
    ids_TK: np.ndarray, tokens_P: np.ndarray, placed_RS: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """A replica for each choice, as likely as its part of the expert's tokens: physical ids ``[T, K]``."""
    order_P = np.argsort(placed_RS, axis=None, kind="stable")
    share_P = np.maximum(tokens_P[order_P], 0.0)
    ends_P = share_P.cumsum()
    last_E = np.searchsorted(placed_RS.ravel()[order_P], np.arange(placed_RS.max() + 1), side="right") - 1
    first_E = np.append(0, last_E[:-1] + 1)
    begin_E = ends_P[first_E] - share_P[first_E]
    at_TK = begin_E[ids_TK] + generator.random(ids_TK.shape) * (ends_P[last_E] - begin_E)[ids_TK]
    found_TK = np.searchsorted(ends_P, at_TK, side="right")
    chosen_TK: np.ndarray = order_P[np.clip(found_TK, first_E[ids_TK], last_E[ids_TK])]
    return chosen_TK


def work_of_ranks(
    rank_TK: np.ndarray, source_T: np.ndarray, ranks: int, way: str, generator: np.random.Generator
) -> np.ndarray:
    """Routed and shared tokens that each rank computes, ``[R]``: every token is shared once."""
    routed_R = np.bincount(rank_TK.ravel(), minlength=ranks)
    own_R = np.bincount(source_T, minlength=ranks)
    shared_T = source_T.copy()
    if way != AT_HOME:
        for source in np.flatnonzero(own_R >= FEWEST_TOKENS):
            here = source_T == source
            if way == BY_OWN_COUNTS:
                load_R = np.bincount(rank_TK[here].ravel(), minlength=ranks)
                more, everywhere = load_R.sum() // rank_TK.shape[1], True
            else:
                load_R = routed_R + own_R
                more, everywhere = routed_R.sum() // rank_TK.shape[1], False
            target = -(-(load_R.sum() + more) // ranks)
            everywhere = everywhere or bool(load_R.max() <= target)
            may_CR = np.ones((int(here.sum()), ranks), dtype=bool)
            if not everywhere:
                may_CR[:] = np.arange(ranks) == source
                np.put_along_axis(may_CR, rank_TK[here], True, axis=1)
            shared_T[here] = _chosen(load_R, target, source, may_CR, generator)
    return routed_R + np.bincount(shared_T, minlength=ranks)


def _chosen(
    load_R: np.ndarray, target: int, source: int, may_CR: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The rank of each token's shared expert, among those that it may go to; ``[C]``, tokens of one source rank."""
    home_R = np.arange(load_R.size) == source
    room_R = np.maximum(target - load_R, 0)
    room_CR = np.where(home_R, room_R, room_R * _AWAY // _HOME) * may_CR
    total_C = room_CR.sum(axis=1)
    at_C = generator.integers(np.maximum(total_C, 1))
    chosen_C: np.ndarray = (room_CR.cumsum(axis=1) <= at_C[:, None]).sum(axis=1)
    for token in np.flatnonzero(total_C == 0):
        chosen_C[token] = source
        for rank in np.flatnonzero(may_CR[token]):
            if load_R[rank] * _HOME < load_R[chosen_C[token]] * _AWAY:
                chosen_C[token] = rank
    return chosen_C
