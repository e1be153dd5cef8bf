"""Splits a step's tokens over the replicas of their experts so that the hottest rank's load is minimal.

All ranks compute the same split from the same counts. The computation uses only tensor operators whose shapes depend
only on the placement's shape, and the host reads no intermediate result, so a graph can capture it.

The split with the smallest sum of squared rank loads also has the lowest peak. It is computed with the alternating
direction method of multipliers (ADMM): each round multiplies by a matrix that depends on the placement, and then
projects the result. The penalty on the distance from the projection is small in the early rounds, which evens out the
ranks, and large in the late rounds, which identifies the slots that get no tokens.

The split is then rounded to whole tokens along a spanning forest of ranks and replicated experts. Within the forest,
rounding changes each rank's load by less than one token. Replicas outside the forest close cycles, whose best rounding
is not known in advance. Several roundings are therefore computed together, and the one with the lowest peak load
is used.

The distance from the optimum is a fraction of a rank's tokens that shrinks with every round, so larger steps need more
rounds. The number of rounds must be the same on all ranks, and the host must know it.

Results must be bitwise identical on all ranks, on different processors and with any order of summation. Splits are
therefore computed in 64ths of a token and matrices in multiples of 2**-20, so that every sum is exact in float64 for
steps of up to 2**22 choices.

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

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.placement import Int32
from worker_agent.counting import count_ids, sorted_positions
from worker_agent.device import on_host
from worker_agent.stepwise_tables import PENALTIES, max_replica_slots, rounding_dithers, split_tables

ROUNDS = 22
"""Number of rounds for steps of up to ``_BASE_CHOICES`` choices.

For the distance from the optimum with other numbers of rounds, see ``docs/research/stepwise.md``.
"""
_EXTRA_ROUNDS = 20
"""Number of additional rounds for a step of four times ``_BASE_CHOICES`` choices."""
_BASE_CHOICES = 8192
UNKNOWN_CHOICES = 4 * _BASE_CHOICES
"""Number of choices to assume if the ranks do not know the size of a step."""


def rounds_for(choices: int) -> int:
    """Return the number of rounds for a step with a total of ``choices`` choices on all ranks.

    The number of rounds grows with the square root of the number of choices.

    Examples
    --------
    >>> [rounds_for(choices) for choices in (1024, 8192, 4 * 8192, 16 * 8192)]
    [22, 22, 42, 82]
    """
    return ROUNDS + ceil(_EXTRA_ROUNDS * (sqrt(max(choices / _BASE_CHOICES, 1.0)) - 1.0))


@lru_cache(maxsize=64)
def _schedule(rounds: int) -> tuple[tuple[int, int], ...]:
    """Return each round's index into ``PENALTIES`` and its index into ``StepwiseSplit.rounds_CM2``."""
    levels = [number * len(PENALTIES) // (rounds + 1) for number in range(rounds + 1)]
    # The matrix for the first round of a penalty precedes the matrix for its other rounds.
    return tuple((level, 2 * level - (level > before)) for before, level in pairwise(levels))


class Gatherer(Protocol):
    """Group of ranks that split a step together, such as ``eplb_lab.layer.rank_group.RankGroup``."""

    rank: int
    size: int

    def all_gather(self, rows_TX: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks in rank order. Every rank passes the same number of rows."""
        ...


class StepwiseSplit:
    """Split of each step's tokens under the most recently installed placement.

    It is not a ``torch.nn.Module``, because casting a model to a different dtype must not cast these tensors. For the
    dimension suffixes in names, see ``stepwise_tables``.

    Parameters
    ----------
    phy2log_RS
        Initial placement, int32 ``[R, S]``. Every expert must be placed.
    experts
        E, the number of logical experts.
    device
        Device of the tensors.
    rounds
        Number of rounds; by default, ``rounds_for`` of the step's size.
    """

    physical_P1: torch.Tensor
    """Physical id of each slot, then 0 for padding choices, int32."""

    expert_P: torch.Tensor
    """Expert of each slot, int64."""

    expert_M: torch.Tensor
    """Expert of each replica slot, int64."""

    position_M: torch.Tensor
    """Index of each replica slot among the P slots, int64."""

    totals_YE: torch.Tensor
    """Matrix from counts to totals: the tokens of each rank's unreplicated experts, then of each replicated expert."""

    from_totals: torch.Tensor
    """Matrix from totals to all values that depend only on them: the rounds' constants and the rounding's inputs."""

    rounds_CM2: torch.Tensor
    """Matrix for each kind of round. ``_schedule`` returns the order in which the kinds are used."""

    exact_X2: torch.Tensor
    """Matrix from the final state to the running sums of rank loads and the tokens of replica slots."""

    by_sum_XM: torch.Tensor
    """Matrix from rounded running sums and slots to whole tokens of replica slots."""

    bound_MR: torch.Tensor
    """Matrix from the tokens of replica slots to an upper bound on the rank loads."""

    later_MM: torch.Tensor
    """Matrix that sums the tokens in later slots of the same expert."""

    def __init__(
        self, phy2log_RS: Int32, experts: int, device: torch.device | str = "cpu", rounds: int | None = None
    ) -> None:
        ranks, slots = phy2log_RS.shape
        self._experts = experts
        self._ranks = ranks
        self._rounds = rounds
        self._replica_slots = max(max_replica_slots(experts, ranks, slots), 1)
        for name, table in split_tables(phy2log_RS, experts, self._replica_slots).items():
            setattr(self, name, torch.from_numpy(table).to(device))
        self._matrices = self.rounds_CM2.unbind()
        self._dither_WX = torch.from_numpy(self._dithers()).to(device)

    @staticmethod
    def check(layer: int, dispatchers: Sequence[str], device_type: str) -> None:
        """Raise ``ValueError`` if the layer does not support the stepwise split."""
        if "moge" in dispatchers:
            raise ValueError(
                f"layer {layer}: grouped experts have no replicas to split tokens over; use split='tables'"
            )
        if device_type == "npu":
            raise ValueError(
                f"layer {layer}: the stepwise split needs float64 matrix products, which NPUs do not support; "
                "use split='tables'"
            )

    def install(self, phy2log_RS: Int32) -> None:
        """Switch to a new placement of the same shape, in place. Call this between two steps."""
        tables = split_tables(phy2log_RS, self._experts, self._replica_slots)
        # The dither is constant, but a sleeping engine may have discarded its memory.
        for name, table in (*tables.items(), ("_dither_WX", self._dithers())):
            tensor = getattr(self, name)
            tensor.copy_(on_host(torch.from_numpy(table), tensor.device), non_blocking=True)

    def _dithers(self) -> npt.NDArray[np.float64]:
        return rounding_dithers(self._ranks, self._replica_slots)

    def ends(self, counts_E: torch.Tensor, choices: int = UNKNOWN_CHOICES) -> torch.Tensor:
        """Compute the split of one step.

        The tokens of all ranks are numbered in expert order, and slots are sorted by expert and physical id. Token
        ``n`` is assigned to the first slot whose end is greater than ``n``.

        Parameters
        ----------
        counts_E
            Total tokens of each expert on all ranks, integers.
        choices
            Upper bound on the sum of ``counts_E``, known to the host of every rank.

        Returns
        -------
        torch.Tensor
            Exclusive end of each slot's tokens, int64 ``[P]``, in ascending order.

        Examples
        --------
        Expert 0 has slots on both ranks. Rank 0 also holds expert 1, and rank 1 holds expert 2. With 5, 4 and 1 tokens,
        expert 0 sends one token to rank 0 and four to rank 1, so that both ranks compute five tokens:

        >>> import numpy as np
        >>> split = StepwiseSplit(np.array([[0, 1], [0, 2]], dtype=np.int32), experts=3)
        >>> split.ends(torch.tensor([5, 4, 1]))
        tensor([ 1,  5,  9, 10])
        """
        linear = torch.mv(self.from_totals, torch.mv(self.totals_YE, counts_E.to(torch.float64)))
        replica_slots = self._replica_slots
        sizes = [replica_slots] * len(PENALTIES) + [self._ranks + replica_slots, replica_slots, self._ranks]
        *starts, constant_X, base_M, first_R = linear.split(sizes)
        rounds = rounds_for(choices) if self._rounds is None else self._rounds
        exact_X = torch.addmv(constant_X, self.exact_X2, self._state(starts, rounds))
        later_M = torch.mv(self.later_MM, self._rounded(exact_X, base_M, first_R)).to(torch.int64)
        # On a cycle, the rounded slots of an expert may not add up to its tokens. The expert's first slot gets the
        # difference.
        later_M = torch.minimum(later_M, counts_E.index_select(0, self.expert_M))
        ends_P = counts_E.cumsum(0).index_select(0, self.expert_P)
        return ends_P.index_add_(0, self.position_M, later_M, alpha=-1)

    def split(
        self, ids_TK: torch.Tensor, group: Gatherer | None, common_tokens: int | None = None
    ) -> torch.Tensor:
        """Assign each of this rank's choices to a physical expert.

        Parameters
        ----------
        ids_TK
            Logical experts, -1 for padding choices.
        group
            Ranks that have different tokens. Each rank sends its E counts to all others as int32. ``None`` if all ranks
            see the same tokens, in which case no exchange is needed.
        common_tokens
            Largest number of tokens on any rank of the group, if all ranks know it.

        Returns
        -------
        torch.Tensor
            Physical experts, int32 ``[T, K]``; arbitrary for padding choices.
        """
        if group is None:
            choices = ids_TK.numel()
        elif common_tokens is None:
            choices = UNKNOWN_CHOICES
        else:
            choices = common_tokens * group.size * ids_TK.shape[1]
        ids_N = ids_TK.reshape(-1)
        # Count padding choices (-1) as one additional expert.
        bucket_N = ids_N.long() % (self._experts + 1)
        counts_E = count_ids(bucket_N, self._experts + 1)[:-1]
        position_N = sorted_positions(bucket_N)
        if group is not None:
            local_E = counts_E
            counts_RE = group.all_gather(local_E.to(torch.int32).unsqueeze(0)).long()
            counts_E = counts_RE.sum(dim=0)
            earlier_E = counts_RE[: group.rank].sum(dim=0)
            # Shift by the other ranks' choices of lower-numbered experts, and by earlier ranks' choices of the same
            # expert.
            shift_E = (counts_E - local_E).cumsum(0) - (counts_E - local_E) + earlier_E
            position_N = position_N + shift_E.index_select(0, ids_N.clamp(min=0))
        return self.physical(position_N, counts_E, choices).view_as(ids_TK)

    def physical(
        self, position_N: torch.Tensor, counts_E: torch.Tensor, choices: int = UNKNOWN_CHOICES
    ) -> torch.Tensor:
        """Return the physical expert of each choice, int32 ``[N]``.

        Parameters
        ----------
        position_N
            Index of each choice among all ranks' choices in expert order, int64.
        counts_E
            See ``ends``.
        choices
            See ``ends``.
        """
        slot_N = torch.searchsorted(self.ends(counts_E, choices), position_N, right=True)
        return self.physical_P1.index_select(0, slot_N)

    def _state(self, starts: Sequence[torch.Tensor], rounds: int) -> torch.Tensor:
        """Return the state after all rounds, preceded by its absolute value, float64 ``[2 * M]`` in 64ths of a token.

        Positive entries are the near-optimal token counts of replica slots. An expert's slots may not add up exactly to
        its tokens.
        """
        state_M2 = starts[0].new_empty(2 * self._replica_slots)
        absolute_M, state_M = state_M2.split(self._replica_slots)
        torch.round(starts[0], out=state_M)
        torch.abs(state_M, out=absolute_M)
        next_M = torch.empty_like(state_M)
        for level, kind in _schedule(rounds):
            torch.addmv(starts[level], self._matrices[kind], state_M2, out=next_M)
            torch.round(next_M, out=state_M)
            torch.abs(state_M, out=absolute_M)
        return state_M2

    def _rounded(self, exact_X: torch.Tensor, base_M: torch.Tensor, first_R: torch.Tensor) -> torch.Tensor:
        """Round a split to whole tokens.

        Each rounding adds its own dither. It rounds the running sums of the rank loads along the forest, which
        determine the slots in the forest, and rounds the slots outside the forest separately. The rounding with the
        lowest bound on the peak load is returned. The bound includes the excess tokens of slots.

        Parameters
        ----------
        exact_X
            Running sums of the rank loads, followed by the tokens of the slots; all in tokens.
        base_M
            Tokens of the slots if ``exact_X`` were zero.
        first_R
            Rank loads if the first slot of each expert had all of the expert's tokens.

        Returns
        -------
        torch.Tensor
            Whole tokens of the replica slots, float64 ``[M]``. The sum over an expert's slots may differ from its
            tokens by a few.
        """
        whole_WX = torch.add(self._dither_WX, exact_X).floor_()
        slots_WM = torch.addmm(base_M, whole_WX, self.by_sum_XM).relu_()
        bound_WR = torch.addmm(first_R, slots_WM, self.bound_MR)
        best_1 = bound_WR.amax(dim=1).argmin(dim=0, keepdim=True)
        return slots_WM.index_select(0, best_1).view(-1)
