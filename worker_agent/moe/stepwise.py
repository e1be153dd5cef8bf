"""The split of one step's tokens over the replicas of their experts that leaves the hottest rank as cool as can be.

All ranks compute the same split from the same counts, by tensor operators alone: shapes depend on the placement's shape
only, nothing is read on the host, and a graph can capture it. The split with the least squared rank loads has the least
peak too. It is found by the alternating direction method of multipliers: a product with a matrix that the placement
determines, and a projection, in turn. It is then rounded along a spanning forest of the ranks that share experts, where
whole tokens cost no rank more than part of one. Replicas beside the forest close cycles; which way to round those
nobody knows before, so several ways are tried at once, and the one that cuts off the fewest tokens is taken.

All ranks must get the same bits, whatever their processors and in whatever order these sum: splits are computed in
64ths of a token and matrices in 65536ths, so that every sum is exact in float64 (up to 2**26 choices in a step).

References
----------
S. Boyd, N. Parikh, E. Chu, B. Peleato, J. Eckstein, *Distributed Optimization and Statistical Learning via the
Alternating Direction Method of Multipliers*, 2011 (section 5.2, and over-relaxation in 3.4.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb_service.placement import Int32
from worker_agent.moe.operators import count_ids
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.stepwise_tables import UNITS, most_shared, split_tables, ways_to_round
from worker_agent.moe.turns import turns

ROUNDS = 20
"""Of product and projection; ``docs/stepwise.md`` has how far from the optimum fewer and more end."""


def check_splittable(layer: int, dispatchers: Sequence[str], device_type: str) -> None:
    """Raise ``ValueError`` naming the layer where tokens cannot be split by step."""
    if "moge" in dispatchers:
        raise ValueError(
            f"layer {layer}: grouped experts have no replicas to split tokens over; split by tables"
        )
    if device_type == "npu":
        raise ValueError(
            f"layer {layer}: splitting by step needs float64 products, which an NPU does not have; split by tables"
        )


class StepwiseSplit:
    """Splits a step's tokens by their counts, under the placement that was installed last.

    No ``torch.nn.Module``: a model that is cast to another dtype must not take these tensors along.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, the first placement: every expert placed, none twice on a rank.
    experts
        E.
    device
        Of the counts, and of all that is computed.
    rounds
        How often product and projection take turns.
    """

    replicas_EC: torch.Tensor
    """int32 ``[E, C]``: the physical ids of each expert's replicas in order, the last one repeated."""

    place_M: torch.Tensor
    from_counts: torch.Tensor
    round_M2: torch.Tensor
    own_MM: torch.Tensor
    first_M: torch.Tensor
    rank_sums_RM: torch.Tensor
    by_cut_MX: torch.Tensor
    running_MM: torch.Tensor

    def __init__(
        self, phy2log_RS: Int32, experts: int, device: torch.device | str = "cpu", rounds: int = ROUNDS
    ) -> None:
        ranks, slots = phy2log_RS.shape
        self._experts, self._ranks, self._rounds = experts, ranks, rounds
        self._shared = max(most_shared(experts, ranks, slots), 1)
        self._columns = min(ranks, ranks * slots - experts + 1)
        for name, table in split_tables(phy2log_RS, experts, self._shared, self._columns).items():
            setattr(self, name, torch.from_numpy(table).to(device))
        # One place more than replicas: padding ends there.
        places = experts * self._columns + 1
        self._never_N = torch.full((places,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=device)
        self._ones_M = torch.ones(self._shared, dtype=torch.float64, device=device)
        self._dither_WX = torch.from_numpy(ways_to_round(ranks, self._shared)).to(device)

    def install(self, phy2log_RS: Int32) -> None:
        """Compute what another placement of the same shape determines, and write it in place, between two steps."""
        tables = split_tables(phy2log_RS, self._experts, self._shared, self._columns)
        for name, table in tables.items():
            getattr(self, name).copy_(torch.from_numpy(table))

    def ends(self, counts_E: torch.Tensor) -> torch.Tensor:
        """Where the tokens of each replica end, int64 ``[E, C]``.

        Token ``i`` of an expert, counted over all ranks, goes to the first replica whose end is above ``i``, or else to
        the last one. ``counts_E`` are the experts' tokens of all ranks, of any integer dtype.
        """
        counts_E = counts_E.to(torch.float64)
        sizes = (self._shared, self._shared, self._ranks)
        start_M, tokens_M, alone_R = torch.mv(self.from_counts, counts_E).split(sizes)
        flow_M = self._flow(start_M, tokens_M)
        ends_M = torch.mv(self.running_MM, self._rounded(flow_M, alone_R))
        ends_N = self._never_N.index_copy(0, self.place_M, ends_M.to(torch.int64))
        return ends_N[:-1].view(self._experts, self._columns)

    def split(self, ids_TK: torch.Tensor, group: RankGroup | None) -> torch.Tensor:
        """The physical expert of each of this rank's choices, int32 ``[T, K]``; anything for those that are -1.

        ``group`` are the ranks that have tokens of their own: each sends its counts to every other, E int32 numbers.
        ``None`` where all ranks see the same tokens, and nobody need ask.
        """
        ids_N = ids_TK.reshape(-1)
        # Choices that are not real are counted as an expert behind the others.
        bucket_N = ids_N.long() % (self._experts + 1)
        own_E1 = count_ids(bucket_N, self._experts + 1)
        turn_N = turns(bucket_N, own_E1)
        counts_E = own_E1[:-1]
        if group is not None:
            counts_RE = group.all_gather(counts_E.to(torch.int32).unsqueeze(0)).long()
            counts_E, before_E = counts_RE.sum(dim=0), counts_RE[: group.rank].sum(dim=0)
            turn_N = turn_N + before_E.index_select(0, ids_N.clamp(min=0))
        return self.physical(ids_N.clamp(min=0), turn_N, counts_E).view_as(ids_TK)

    def physical(self, ids_N: torch.Tensor, turn_N: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """The physical expert of each choice, int32 ``[N]``.

        Parameters
        ----------
        ids_N
            int ``[N]``, logical experts.
        turn_N
            int64 ``[N]``, which of its expert's tokens each is, counted from 0 over all ranks.
        counts_E
            As for ``ends``.
        """
        ends_NC = self.ends(counts_E).index_select(0, ids_N)
        column_N = (turn_N.unsqueeze(1) >= ends_NC).sum(dim=1).clamp_(max=self._columns - 1)
        place_N = column_N.add_(ids_N, alpha=self._columns)
        return self.replicas_EC.view(-1).index_select(0, place_N)

    def _flow(self, start_M: torch.Tensor, tokens_M: torch.Tensor) -> torch.Tensor:
        """Tokens of each shared slot in 64ths, those of an expert adding up to its tokens exactly."""
        shared = self._shared
        state = start_M.new_empty(2 * shared)
        size_M, here_M = state[:shared], state[shared:]
        torch.round(start_M, out=here_M)
        torch.abs(here_M, out=size_M)
        next_M = start_M.new_empty(shared)
        for _ in range(self._rounds):
            torch.addmv(start_M, self.round_M2, state, out=next_M)
            torch.round(next_M, out=here_M)
            torch.abs(here_M, out=size_M)
        flow_M = torch.relu(here_M)
        # A 64th more, so that there is no division by zero.
        sum_M = torch.addmv(self._ones_M, self.own_MM, flow_M)
        flow_M.mul_(tokens_M).div_(sum_M).floor_()
        # What has been cut off goes to each expert's first replica.
        left_M = torch.addmv(tokens_M, self.own_MM, flow_M, alpha=-1)
        return flow_M.addcmul_(left_M, self.first_M)

    def _rounded(self, flow_M: torch.Tensor, alone_R: torch.Tensor) -> torch.Tensor:
        """The same in whole tokens, which may miss an expert's by a few where its slots are on a cycle.

        The ranks' running sums along the forest are rounded, and what each of its slots must carry follows; slots
        beside the forest are rounded by themselves. Each way does so by other dithers, and that wins which leaves the
        fewest tokens of a slot below zero.
        """
        exact_X = torch.cat((torch.addmv(alone_R, self.rank_sums_RM, flow_M), flow_M))
        rest_M = torch.addmv(flow_M, self.by_cut_MX, exact_X, beta=1 / UNITS, alpha=-1 / UNITS)
        whole_WX = torch.add(self._dither_WX, exact_X).mul_(1 / UNITS).floor_()
        way_WM = torch.addmm(rest_M, whole_WX, self.by_cut_MX.t()).relu_()
        # All ways have the same sum, but for what was below zero.
        best_1 = way_WM.sum(dim=1).argmin(dim=0, keepdim=True)
        return way_WM.index_select(0, best_1).view(-1)
