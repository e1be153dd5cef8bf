"""Derive a step's phase and token count from the schedule that vLLM or vLLM-Ascend is executing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eplb_core.heat.phase import StepPhase


@dataclass(frozen=True)
class Batch:
    """Phase and token count (excluding padding) of a step on one data-parallel rank."""

    phase: StepPhase
    tokens: int


def batch_of(schedule: Any) -> Batch | None:
    """Return the batch that a ``SchedulerOutput`` schedules, or ``None`` if it schedules no tokens.

    A request is decoding if the step computes one token for it, plus any draft tokens to verify. A request with more
    tokens is prefilling, even if it only recomputes tokens after being preempted.
    """
    count_of = schedule.num_scheduled_tokens
    drafts_of = schedule.scheduled_spec_decode_tokens
    tokens = int(schedule.total_num_scheduled_tokens)
    if tokens == 0:
        return None
    prefilling = 0
    if tokens > len(count_of):
        prefilling = sum(count > 1 + len(drafts_of.get(name, ())) for name, count in count_of.items())
    if prefilling == 0:
        return Batch(StepPhase.DECODE, tokens)
    return Batch(StepPhase.PREFILL if prefilling == len(count_of) else StepPhase.MIXED, tokens)


@dataclass(frozen=True)
class TokenShare:
    """One EP rank's share of the tokens of its data-parallel rank.

    Parameters
    ----------
    index
        Index of the EP rank within its data-parallel rank, starting at 0.
    ranks
        Number of EP ranks in the data-parallel rank.
    divided
        True if the tokens are divided evenly among the ranks. If False, every rank has all of the tokens, and only the
        first rank reports them.

    Examples
    --------
    >>> [TokenShare(index, ranks=4, divided=True).of(10) for index in range(4)]
    [3, 3, 2, 2]
    >>> [TokenShare(index, ranks=4, divided=False).of(10) for index in range(4)]
    [10, 0, 0, 0]
    """

    index: int
    ranks: int
    divided: bool

    def of(self, tokens: int) -> int:
        """Return the number of tokens that this rank reports. The counts of all ranks add up to ``tokens``."""
        if not self.divided:
            return tokens if self.index == 0 else 0
        return tokens // self.ranks + (self.index < tokens % self.ranks)


def share_of_rank(rank: int, ranks: int, shared: bool) -> TokenShare:
    """Return the token share of an EP rank.

    Parameters
    ----------
    rank
        Index of the EP rank in its group. The EP ranks of one data-parallel rank have consecutive indices.
    ranks
        Number of EP ranks in each data-parallel rank.
    shared
        True if all of these ranks have the same tokens.
    """
    return TokenShare(rank % ranks, ranks, divided=not shared)


def step_of(
    batch: Batch | None, share: TokenShare | None, *, is_dummy: bool = False
) -> tuple[StepPhase, int | None]:
    """Return the phase and this rank's token count to pass to ``Agent.step``.

    Parameters
    ----------
    batch
        Batch of the data-parallel rank. If ``None``, the step is reported as a decode step, as for hosts that do not
        label their steps.
    share
        This rank's share of the tokens, or ``None`` if rank 0 counts the tokens of several data-parallel ranks. The
        returned token count is then ``None`` as well.
    is_dummy
        True if this rank has no real tokens in the step.
    """
    if is_dummy:
        return StepPhase.DUMMY, None if share is None else 0
    if batch is None:
        return StepPhase.DECODE, None
    return batch.phase, None if share is None else share.of(batch.tokens)
