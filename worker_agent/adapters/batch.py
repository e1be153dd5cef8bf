"""Phase and number of tokens of a step, derived from the schedule that vLLM or vLLM-Ascend executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eplb_core.wire.heat import StepPhase


@dataclass(frozen=True)
class Batch:
    """The phase of a step on one data-parallel rank, and its number of tokens without padding."""

    phase: StepPhase
    tokens: int


def batch_of(scheduled: Any) -> Batch | None:
    """Return the batch of a ``SchedulerOutput``, or ``None`` if it has no tokens.

    A request decodes if it computes one token and the draft tokens that the step verifies. A request that computes more
    tokens prefills, even if it does so because it was preempted.
    """
    count_of = scheduled.num_scheduled_tokens
    drafts_of = scheduled.scheduled_spec_decode_tokens
    tokens = int(scheduled.total_num_scheduled_tokens)
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
    """Share of one EP rank in the tokens of its data-parallel rank, which has ``parts`` EP ranks.

    If ``divided``, all have equal shares. Otherwise all have the same tokens, and only the first reports them.
    """

    part: int
    parts: int
    divided: bool

    def of(self, tokens: int) -> int:
        """Return the rank's own tokens out of ``tokens``. The shares of all parts sum to ``tokens``."""
        if not self.divided:
            return tokens if self.part == 0 else 0
        return tokens // self.parts + (self.part < tokens % self.parts)


def share_of_rank(rank: int, parts: int, shared: bool) -> TokenShare:
    """Return the share of an EP rank whose data-parallel rank has ``parts`` ranks."""
    return TokenShare(rank % parts, parts, divided=not shared)


def step_of(
    batch: Batch | None, share: TokenShare | None, *, is_dummy: bool = False
) -> tuple[StepPhase, int | None]:
    """Return the phase and the rank's own tokens for ``Agent.step``.

    The tokens are ``None`` if ``share`` is ``None``, because rank 0 then counts those of several data-parallel ranks. A
    step without a known ``batch`` is reported as decode, as for hosts that do not label their steps.
    """
    if is_dummy:
        return StepPhase.DUMMY, None if share is None else 0
    if batch is None:
        return StepPhase.DECODE, None
    return batch.phase, None if share is None else share.of(batch.tokens)
