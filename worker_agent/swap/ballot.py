"""What a rank says in a vote, what all ranks together said, and what follows from it.

A vote is one integer all-reduce with MIN. Every field also travels negated, so that one reduction gives minimum and
maximum: two equal bounds mean that all ranks said the same. The decision is a function of the outcome alone, and the
outcome is the same on all ranks; that is what makes ranks act together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

BALLOT_WIDTH = 9
"""Integers in one ballot on the wire."""


class Progress(enum.IntEnum):
    """How far a rank is with the layer that its plan is at."""

    IDLE = 0
    OFFERED = 1
    TRANSFERRING = 2
    READY = 3


class VoteResult(enum.Enum):
    """What all ranks do at this step boundary."""

    NOTHING = "nothing"
    START = "start the transfer of the plan's next layer"
    COMMIT = "commit the layer"
    ABORT = "drop the plan"
    REALIGN = "drop the plan and vote again at a common forward pass: the ranks count different ones"
    DIVERGED = "serve no more: the ranks serve different placements"


@dataclass(frozen=True)
class Ballot:
    """One rank's vote.

    ``plan`` is the digest of the plan that it holds, 0 for none; ``installed`` fingerprints what it serves; ``forward``
    is the forward pass after which, by this rank's count, the vote was due.
    """

    progress: Progress
    plan: int
    installed: int
    abort: bool
    forward: int = 0

    def encode(self) -> list[int]:
        """``BALLOT_WIDTH`` signed 64-bit integers for a MIN all-reduce."""
        bounds = [self.progress, self.plan, self.installed, self.forward]
        return [*(int(value) for value in bounds), *(-int(value) for value in bounds), -int(self.abort)]


@dataclass(frozen=True)
class Outcome:
    """The ballots of all ranks, reduced."""

    slowest: Progress
    plan_low: int
    plan_high: int
    installed_agree: bool
    abort: bool
    forward_low: int = 0
    forward_high: int = 0
    confirmed: bool = True

    @classmethod
    def decode(cls, reduced: Sequence[int]) -> Outcome:
        """From the reduced integers; raises ``ValueError`` where they are not a ballot's."""
        if len(reduced) != BALLOT_WIDTH:
            raise ValueError(f"a ballot has {BALLOT_WIDTH} integers, got {len(reduced)}")
        progress, plan_low, installed_low, forward_low = reduced[:4]
        _, plan_high, installed_high, forward_high, abort = reduced[4:]
        return cls(
            slowest=Progress(progress),
            plan_low=plan_low,
            plan_high=-plan_high,
            installed_agree=installed_low == -installed_high,
            abort=abort < 0,
            forward_low=forward_low,
            forward_high=-forward_high,
        )

    @classmethod
    def nobody(cls) -> Outcome:
        """As if no rank had held a plan: nothing follows from it."""
        return cls(Progress.IDLE, 0, 0, installed_agree=True, abort=False)

    def with_abort(self) -> Outcome:
        """The same, had one rank more voted to abort."""
        return replace(self, abort=True)

    def unconfirmed(self) -> Outcome:
        """The same, where not all ranks are at the boundary at which it is counted."""
        return replace(self, confirmed=False)

    @property
    def plans(self) -> frozenset[int]:
        """Digests that are known to be held by some rank."""
        return frozenset({self.plan_low, self.plan_high} - {0})

    @property
    def idle(self) -> bool:
        """Whether all ranks, at one forward pass, have said that they hold no plan."""
        return self.result is VoteResult.NOTHING and not self.plans

    @cached_property
    def result(self) -> VoteResult:
        """The one thing that all ranks do; see the table in ARCHITECTURE.md."""
        if not self.installed_agree:
            return VoteResult.DIVERGED
        if self.forward_low != self.forward_high or not self.confirmed:
            return VoteResult.REALIGN
        if not self.plans:
            return VoteResult.NOTHING
        if self.abort or self.plan_low not in (0, self.plan_high):
            return VoteResult.ABORT
        if self.plan_low == 0:
            return VoteResult.NOTHING
        return {
            Progress.OFFERED: VoteResult.START,
            Progress.READY: VoteResult.COMMIT,
        }.get(self.slowest, VoteResult.NOTHING)
