"""The split of one step's tokens over the replicas of their experts that leaves the hottest rank as cool as can be.

All ranks compute the same split from the same counts, by tensor operators alone: shapes depend on the placement's shape
only, nothing is read on the host, and a graph can capture it. The split with the least squared rank loads has the least
peak too. It is found by the alternating direction method of multipliers: a product with a matrix that the placement
determines, and a projection, in turn. Departing from the projection costs little at first, so that all ranks are evened
out, and much in the end, so that slots that get no tokens are found. The split is then rounded along a spanning forest
of the ranks that share experts, where whole tokens cost no rank more than part of one. Replicas beside the forest close
cycles; which way to round those nobody knows before, so several ways are tried at once, and the one with the coolest
hottest rank is taken.

How far from the best a split may end is a part of a rank's tokens that shrinks with every round, and a larger step has
more tokens: so it takes more rounds. Their number must be the same on all ranks, and known on the host.

All ranks must get the same bits, whatever their processors and in whatever order these sum: splits are computed in
64ths of a token and matrices in 2**-20, so that every sum is exact in float64 (up to 2**22 choices in a step).

References
----------
S. Boyd, N. Parikh, E. Chu, B. Peleato, J. Eckstein, *Distributed Optimization and Statistical Learning via the
Alternating Direction Method of Multipliers*, 2011 (section 5.2, and over-relaxation in 3.4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, sqrt
from typing import Protocol

import torch

from eplb_core.placement import Int32
from worker_agent.counting import count_ids, sorted_positions
from worker_agent.stepwise_tables import PENALTIES, most_shared, split_tables, ways_to_round

ROUNDS = 22
"""Rounds of product and projection, in steps of up to ``_FEW_CHOICES``; ``docs/research/stepwise.md`` has how far from
the optimum fewer and more end."""
_MORE_ROUNDS = 20
"""For a step of four times as many choices."""
_FEW_CHOICES = 8192
UNKNOWN_CHOICES = 4 * _FEW_CHOICES
"""The size of steps of which the ranks do not know how many choices they have."""


def rounds_for(choices: int) -> int:
    """Return the rounds that a step takes with so many choices of all ranks; they grow with the square root."""
    return ROUNDS + ceil(_MORE_ROUNDS * (sqrt(max(choices / _FEW_CHOICES, 1.0)) - 1.0))


@lru_cache(maxsize=64)
def _schedule(rounds: int) -> tuple[tuple[int, int], ...]:
    """Return for each round its number in ``PENALTIES`` and in ``StepwiseSplit.rounds_CM2``."""
    levels = [number * len(PENALTIES) // (rounds + 1) for number in range(rounds + 1)]
    # A level's first round has the matrix before its others'.
    return tuple((level, 2 * level - (level > before)) for before, level in pairwise(levels))


class Gatherer(Protocol):
    """Ranks that split a step together, such as ``eplb_lab.layer.rank_group.RankGroup``."""

    rank: int
    size: int

    def all_gather(self, rows_TX: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks in rank order. Every rank passes the same number of rows."""
        ...


class StepwiseSplit:
    """Splits a step's tokens by their counts, under the placement that was installed last.

    No ``torch.nn.Module``: a model that is cast to another dtype must not take these tensors along.

    ``phy2log_RS`` is the first placement, int32 ``[R, S]``: every expert placed, none twice on a rank. Product and
    projection take turns ``rounds`` times, by default as often as a step of its size needs.
    """

    physical_P1: torch.Tensor
    """int32: the slots' physical ids by expert; 0 after them, for choices that are not real."""

    expert_P: torch.Tensor
    expert_M: torch.Tensor
    place_M: torch.Tensor
    """The number of each shared slot among the P."""

    parts_YE: torch.Tensor
    from_parts: torch.Tensor
    rounds_CM2: torch.Tensor
    """C kinds of rounds: ``_schedule`` has their order."""

    exact_X2: torch.Tensor
    by_sum_XM: torch.Tensor
    bound_MR: torch.Tensor
    later_MM: torch.Tensor

    def __init__(
        self, phy2log_RS: Int32, experts: int, device: torch.device | str = "cpu", rounds: int | None = None
    ) -> None:
        ranks, slots = phy2log_RS.shape
        self._experts, self._ranks, self._rounds = experts, ranks, rounds
        self._shared = max(most_shared(experts, ranks, slots), 1)
        for name, table in split_tables(phy2log_RS, experts, self._shared).items():
            setattr(self, name, torch.from_numpy(table).to(device))
        self._matrices = self.rounds_CM2.unbind()
        self._dither_WX = torch.from_numpy(ways_to_round(ranks, self._shared)).to(device)

    @staticmethod
    def check(layer: int, dispatchers: Sequence[str], device_type: str) -> None:
        """Raise ``ValueError`` naming the layer where tokens cannot be split by step."""
        if "moge" in dispatchers:
            raise ValueError(
                f"layer {layer}: grouped experts have no replicas to split tokens over; split by tables"
            )
        if device_type == "npu":
            raise ValueError(
                f"layer {layer}: splitting by step needs float64 products, which an NPU does not have; split by tables"
            )

    def install(self, phy2log_RS: Int32) -> None:
        """Compute what another placement of the same shape determines, and write it in place, between two steps."""
        tables = split_tables(phy2log_RS, self._experts, self._shared)
        for name, table in tables.items():
            getattr(self, name).copy_(torch.from_numpy(table))

    def ends(self, counts_E: torch.Tensor, choices: int = UNKNOWN_CHOICES) -> torch.Tensor:
        """Return where the tokens of each slot end, int64 ``[P]``, never below the slot before.

        Slots are by expert and physical id, and so are tokens counted, those of all ranks together: the ``n``-th is for
        the first slot whose end is above ``n``. ``counts_E`` are the experts' tokens of all ranks, integers that add up
        to ``choices`` at most, as every rank's host knows.
        """
        known = torch.mv(self.from_parts, torch.mv(self.parts_YE, counts_E.to(torch.float64)))
        shared = self._shared
        kept = [self._ranks + shared, shared, self._ranks]
        *starts, known_X, uncut_M, first_R = known.split([shared] * len(PENALTIES) + kept)
        rounds = rounds_for(choices) if self._rounds is None else self._rounds
        exact_X = torch.addmv(known_X, self.exact_X2, self._state(starts, rounds))
        later_M = torch.mv(self.later_MM, self._rounded(exact_X, uncut_M, first_R)).to(torch.int64)
        # Rounded splits need not add up where slots are on a cycle: an expert's first slot has the rest.
        later_M = torch.minimum(later_M, counts_E.index_select(0, self.expert_M))
        ends_P = counts_E.cumsum(0).index_select(0, self.expert_P)
        return ends_P.index_add_(0, self.place_M, later_M, alpha=-1)

    def split(
        self, ids_TK: torch.Tensor, group: Gatherer | None, common_tokens: int | None = None
    ) -> torch.Tensor:
        """Return the physical expert of each of this rank's choices, int32 ``[T, K]``; anything where one is -1.

        ``ids_TK`` are logical experts, -1 for a choice that is not real. Each rank of ``group`` has tokens of its own
        and sends its counts to every other, E int32 numbers; without it all ranks see the same tokens, and nobody need
        ask. ``common_tokens`` are the most of any of these ranks, where every one of them knows it.
        """
        if group is None:
            choices = ids_TK.numel()
        elif common_tokens is None:
            choices = UNKNOWN_CHOICES
        else:
            choices = common_tokens * group.size * ids_TK.shape[1]
        ids_N = ids_TK.reshape(-1)
        # Choices that are not real are counted as an expert behind the others.
        bucket_N = ids_N.long() % (self._experts + 1)
        counts_E = count_ids(bucket_N, self._experts + 1)[:-1]
        place_N = sorted_positions(bucket_N)
        if group is not None:
            own_E = counts_E
            counts_RE = group.all_gather(own_E.to(torch.int32).unsqueeze(0)).long()
            counts_E, before_E = counts_RE.sum(dim=0), counts_RE[: group.rank].sum(dim=0)
            others_E = (counts_E - own_E).cumsum(0) - (counts_E - own_E) + before_E
            place_N = place_N + others_E.index_select(0, ids_N.clamp(min=0))
        return self.physical(place_N, counts_E, choices).view_as(ids_TK)

    def physical(
        self, place_N: torch.Tensor, counts_E: torch.Tensor, choices: int = UNKNOWN_CHOICES
    ) -> torch.Tensor:
        """Return the physical expert of each choice, int32 ``[N]``; other arguments as for ``ends``.

        ``place_N``, int64 ``[N]``, is which of all ranks' choices each is, counted expert by expert.
        """
        slot_N = torch.searchsorted(self.ends(counts_E, choices), place_N, right=True)
        return self.physical_P1.index_select(0, slot_N)

    def _state(self, starts: Sequence[torch.Tensor], rounds: int) -> torch.Tensor:
        """Return the end of the rounds, float64 ``[2 * M]`` in 64ths: sizes, and the states that they are of.

        Where these are positive, they are tokens of shared slots, close to the best; an expert's need not quite add up.
        """
        state_M2 = starts[0].new_empty(2 * self._shared)
        size_M, here_M = state_M2.split(self._shared)
        torch.round(starts[0], out=here_M)
        torch.abs(here_M, out=size_M)
        next_M = torch.empty_like(here_M)
        for level, kind in _schedule(rounds):
            torch.addmv(starts[level], self._matrices[kind], state_M2, out=next_M)
            torch.round(next_M, out=here_M)
            torch.abs(here_M, out=size_M)
        return state_M2

    def _rounded(self, exact_X: torch.Tensor, uncut_M: torch.Tensor, first_R: torch.Tensor) -> torch.Tensor:
        """A split of 64ths in whole tokens, float64 ``[M]``, which may miss an expert's by a few.

        The ranks' running sums along the forest are rounded, and what each of its slots must carry follows; slots
        beside the forest are rounded by themselves. Each way does so by other dithers, and that wins whose hottest rank
        is the coolest, by a bound that counts what slots have too much as well. ``uncut_M`` is what slots would carry
        were all of ``exact_X`` zero, ``first_R`` the ranks' loads where experts' first slots have all of their tokens.
        """
        whole_WX = torch.add(self._dither_WX, exact_X).floor_()
        way_WM = torch.addmm(uncut_M, whole_WX, self.by_sum_XM).relu_()
        bound_WR = torch.addmm(first_R, way_WM, self.bound_MR)
        best_1 = bound_WR.amax(dim=1).argmin(dim=0, keepdim=True)
        return way_WM.index_select(0, best_1).view(-1)
