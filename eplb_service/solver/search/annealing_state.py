"""The state of annealing: a placement, what one change would make of its ratio, and the change itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Float32, Int32, homes, set_row
from eplb_service.solver.search.construction import even_shares, replicas_of, share_of
from eplb_service.solver.search.evaluation import loads_in_episodes
from eplb_service.solver.search.top_ranks import TopRanks, top_ranks_of, update_loads


class AnnealingState(NamedTuple):
    """A placement being annealed; all arrays change in place."""

    phy2log_RS: Int32
    """int32 ``[R, S]``."""
    replicas_E: Int32
    """int32 ``[E]``."""
    holds_ER: Bool
    """bool ``[E, R]``, whether a rank holds an expert."""
    holder_EK: Int32
    """int32 ``[E, K]``, the ranks that hold each expert, ``replicas_E`` of them, in no order."""
    top_ranks: TopRanks
    """Rank loads under even shares."""
    rank_K: Int32
    """int32 ``[R]``, ranks that a change being judged would touch."""
    changed_R1: Bool
    """bool ``[R + 1]``, the same as marks; all false between two changes, and the last always."""
    changed_RN: Float32
    """float32 ``[R, N]``, their loads after it."""


class Move(NamedTuple):
    """A change: ``other`` comes to hold the expert ``mine`` of ``rank``."""

    rank: int
    slot: int
    other: int
    place: int
    """The slot of ``other``."""
    mine: int
    theirs: int
    """The expert in that slot."""
    swaps: bool
    """Whether ``rank`` gets ``theirs`` for it; else that replica is given up, and ``mine`` gets one replica more."""
    episode: int
    """Where every rank that gets hotter must stay below what ``rank`` has now; -1 for in none."""


@kernel
def start(phy2log_RS: Int32, scaled_EN: Float32) -> AnnealingState:
    """The state at a complete placement, which is copied; ``scaled_EN`` is normalised heat float32 ``[E, N]``."""
    ranks, slots = phy2log_RS.shape
    experts = scaled_EN.shape[0]
    # No expert can come to have more replicas than this.
    most = min(ranks, ranks * slots - experts + 1)
    holder_EK = np.zeros((experts, most), dtype=np.int32)
    held_E = np.zeros(experts, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            holder_EK[expert, held_E[expert]] = r
            held_E[expert] += 1
    load_RN = loads_in_episodes(phy2log_RS, even_shares(phy2log_RS, experts), scaled_EN)
    return AnnealingState(
        phy2log_RS.copy(),
        replicas_of(phy2log_RS, experts),
        homes(phy2log_RS, experts),
        holder_EK,
        top_ranks_of(load_RN),
        np.zeros(ranks, dtype=np.int32),
        np.zeros(ranks + 1, dtype=np.bool_),
        np.zeros_like(load_RN),
    )


@kernel
def resum(state: AnnealingState, scaled_EN: Float32) -> None:
    """Sum the rank loads afresh: many small changes pile up rounding."""
    share_RS = even_shares(state.phy2log_RS, scaled_EN.shape[0])
    ranks = state.rank_K.shape[0]
    load_RN = loads_in_episodes(state.phy2log_RS, share_RS, scaled_EN)
    for r in range(ranks):
        set_row(state.changed_RN[r], load_RN[r])
        state.rank_K[r] = r
        state.changed_R1[r] = True
    update_loads(state.top_ranks, state.rank_K, ranks, state.changed_R1, state.changed_RN)
    for r in range(ranks):
        state.changed_R1[r] = False


@part
def may_swap(load_NR: Float32, scaled_EN: Float32, replicas_E: Int32, holds_ER: Bool, attempt: Move) -> bool:
    """Whether a swap is legal, and cools ``rank`` in its episode without making ``other`` as hot.

    Parameters
    ----------
    load_NR
        float32 ``[N, R]``, loads of the ranks.
    scaled_EN
        float32 ``[E, N]``, the experts' heat.
    replicas_E
        int32 ``[E]``, replicas of each expert.
    holds_ER
        bool ``[E, R]``, whether each rank holds each expert.
    attempt
        The move that is tried.
    """
    rank, other, mine, theirs, n = attempt.rank, attempt.other, attempt.mine, attempt.theirs, attempt.episode
    legal = rank != other and not holds_ER[mine, other] and not holds_ER[theirs, rank]
    if legal and n >= 0:
        more = scaled_EN[theirs, n] / replicas_E[theirs] - scaled_EN[mine, n] / replicas_E[mine]
        legal = more < 0 and load_NR[n, other] - more < load_NR[n, rank]
    return legal


@part
def may_pass(
    load_NR: Float32, scaled_EN: Float32, replicas_E: Int32, holds_ER: Bool, holder_EK: Int32, attempt: Move
) -> bool:
    """Whether a replica may be passed on, and leaves those that pay for it below ``rank`` in its episode.

    These are ``other`` and all that hold ``theirs``; a thinner share of ``mine`` is not set against what they get.

    Parameters
    ----------
    load_NR
        float32 ``[N, R]``, loads of the ranks.
    scaled_EN
        float32 ``[E, N]``, the experts' heat.
    replicas_E
        int32 ``[E]``, replicas of each expert.
    holds_ER, holder_EK
        Which ranks hold each expert, bool ``[E, R]``, and as a list, int32 ``[E, K]``.
    attempt
        The move that is tried.
    """
    rank, other, mine, theirs, n = attempt.rank, attempt.other, attempt.mine, attempt.theirs, attempt.episode
    legal = rank != other and not holds_ER[mine, other] and replicas_E[theirs] > 1
    if legal and n >= 0:
        limit = load_NR[n, rank]
        lost = scaled_EN[theirs, n] / replicas_E[theirs]
        more = scaled_EN[theirs, n] / (replicas_E[theirs] - 1) - lost
        legal = load_NR[n, other] + scaled_EN[mine, n] / (replicas_E[mine] + 1) - lost < limit
        for k in range(replicas_E[theirs]):
            holder = holder_EK[theirs, k]
            legal = legal and (holder == other or load_NR[n, holder] + more < limit)
    return legal


@part
def swapped_loads(
    load_RN: Float32,
    scaled_EN: Float32,
    replicas_E: Int32,
    attempt: Move,
    rank_K: Int32,
    changed_R1: Bool,
    changed_RN: Float32,
) -> int:
    """Note both ranks' loads after a swap; returns 2.

    Parameters
    ----------
    load_RN
        float32 ``[R, N]``, loads of the ranks.
    scaled_EN
        float32 ``[E, N]``, the experts' heat.
    replicas_E
        int32 ``[E]``, replicas of each expert.
    attempt
        The move that is tried.
    rank_K, changed_R1, changed_RN
        Where the ranks, their marks and their loads are put, as ``peak_of_changed`` takes them.
    """
    rank, other, mine, theirs = attempt.rank, attempt.other, attempt.mine, attempt.theirs
    mine_share, their_share = share_of(replicas_E[mine]), share_of(replicas_E[theirs])
    for n in range(scaled_EN.shape[1]):
        more = their_share * scaled_EN[theirs, n] - mine_share * scaled_EN[mine, n]
        changed_RN[rank, n] = load_RN[rank, n] + more
        changed_RN[other, n] = load_RN[other, n] - more
    rank_K[0], rank_K[1] = rank, other
    changed_R1[rank] = changed_R1[other] = True
    return 2


@part
def passed_loads(
    load_RN: Float32,
    scaled_EN: Float32,
    replicas_E: Int32,
    holds_ER: Bool,
    holder_EK: Int32,
    attempt: Move,
    rank_K: Int32,
    changed_R1: Bool,
    changed_RN: Float32,
) -> int:
    """Note the loads of all ranks that hold either expert once the replica has passed; returns how many these are.

    Parameters
    ----------
    load_RN
        float32 ``[R, N]``, loads of the ranks.
    scaled_EN
        float32 ``[E, N]``, the experts' heat.
    replicas_E
        int32 ``[E]``, replicas of each expert.
    holds_ER, holder_EK
        Which ranks hold each expert, bool ``[E, R]``, and as a list, int32 ``[E, K]``.
    attempt
        The move that is tried.
    rank_K, changed_R1, changed_RN
        Where the ranks, their marks and their loads are put, as ``peak_of_changed`` takes them.
    """
    gainer, loser = attempt.mine, attempt.theirs
    gained = share_of(replicas_E[gainer] + 1)
    less = gained - share_of(replicas_E[gainer])
    lost = share_of(replicas_E[loser])
    more = share_of(replicas_E[loser] - 1) - lost
    zero = np.float32(0.0)
    count = 0
    for k in range(replicas_E[gainer] + replicas_E[loser]):
        if k < replicas_E[gainer]:
            rank = holder_EK[gainer, k]
            of_gainer, of_loser = less, more if holds_ER[loser, rank] else zero
        else:
            rank = holder_EK[loser, k - replicas_E[gainer]]
            of_gainer, of_loser = (gained, -lost) if rank == attempt.other else (zero, more)
        if not changed_R1[rank]:
            for n in range(scaled_EN.shape[1]):
                changed = load_RN[rank, n] + of_gainer * scaled_EN[gainer, n]
                changed_RN[rank, n] = changed + of_loser * scaled_EN[loser, n]
            rank_K[count] = rank
            changed_R1[rank] = True
            count += 1
    return count


@kernel
def apply_move(state: AnnealingState, attempt: Move, count: int) -> None:
    """Make a change whose loads have been noted, of ``count`` ranks."""
    rank, other, mine, theirs = attempt.rank, attempt.other, attempt.mine, attempt.theirs
    state.phy2log_RS[other, attempt.place] = mine
    if attempt.swaps:
        state.phy2log_RS[rank, attempt.slot] = theirs
        _rehouse(state, mine, rank, other)
        _rehouse(state, theirs, other, rank)
    else:
        state.holder_EK[mine, state.replicas_E[mine]] = other
        state.holds_ER[mine, other] = True
        state.replicas_E[mine] += 1
        state.replicas_E[theirs] -= 1
        # The last of the holders takes the place of the one that is no more.
        last = state.holder_EK[theirs, state.replicas_E[theirs]]
        state.holder_EK[theirs, _at(state.holder_EK, theirs, other)] = last
        state.holds_ER[theirs, other] = False
    update_loads(state.top_ranks, state.rank_K, count, state.changed_R1, state.changed_RN)


@kernel
def _rehouse(state: AnnealingState, expert: int, rank: int, other: int) -> None:
    """Let ``other`` hold an expert in place of ``rank``."""
    state.holder_EK[expert, _at(state.holder_EK, expert, rank)] = other
    state.holds_ER[expert, rank] = False
    state.holds_ER[expert, other] = True


@kernel
def _at(holder_EK: Int32, expert: int, rank: int) -> int:
    """Where a rank is among an expert's holders."""
    k = 0
    while holder_EK[expert, k] != rank:
        k += 1
    return k
