"""Carries out what the switch machine asks for: votes, transfers, commits, on the model's thread and beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

from eplb_service.placement import Placement
from worker_agent.adapters.live_layer import LiveLayer
from worker_agent.checked_plan import CheckedPlan
from worker_agent.forward_clock import ForwardClock
from worker_agent.history.record import History
from worker_agent.rendezvous import Rendezvous
from worker_agent.settings import AgentSettings
from worker_agent.swap import actions, machine
from worker_agent.swap.ballot import Outcome, Progress, VoteResult
from worker_agent.swap.carrier import ByteBudget
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.layer_commit import LayerCommit, staged_for
from worker_agent.swap.listener import Committed, Listener, SwitchStats
from worker_agent.swap.restoration import restoring_plan
from worker_agent.swap.transfer import TransferLimits, TransferResult, TransferWorker
from worker_agent.swap.vote import VoteError, Voter
from worker_agent.swap.vote_schedule import VoteSchedule

_log = logging.getLogger("eplb.agent")

_RUN_OUT_POLL_SECONDS = 0.005


class SwitchDriver:
    """One rank's side of the switch, with its threads and links.

    Parameters
    ----------
    layers
        The live layers.
    settings, rendezvous
        How to switch, and with whom.
    clock
        Numbers forward passes.
    listener
        Hears what became of plans.
    history
        Where events are recorded.
    on_commit
        Called with the index of a layer that has just been installed.
    """

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: AgentSettings,
        rendezvous: Rendezvous,
        clock: ForwardClock,
        listener: Listener,
        history: History,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        self.stats = SwitchStats()
        self.state = machine.SwitchState(rendezvous.installed, settings.offer_deadline_steps)
        self.budget = ByteBudget(settings.bytes_per_step)
        self._layers = layers
        self._identity = rendezvous.identity
        self._listener = listener
        self._history = history
        self._layer_commit = LayerCommit(
            layers, self._identity.rank, self._identity.experts, settings.verify_transfers, on_commit
        )
        self._clock = clock
        self._step = 0
        self._group = rendezvous.group
        self.votes = VoteSchedule(rendezvous, settings, clock, history)
        limits = TransferLimits(
            timedelta(seconds=settings.transfer_timeout_seconds),
            settings.chunk_bytes,
            settings.verify_transfers,
        )
        self.transfers = TransferWorker(rendezvous.lanes, limits, self.budget)
        self._staged: TransferResult | None = None

    # What happens at a step boundary, in order

    def take_events(self, step: int, heard: Sequence[CheckedPlan]) -> None:
        """Step boundary ``step`` is here, and these plans have arrived since the last."""
        self._step = step
        if self._group.failure is not None:
            raise FatalSwitchError(self._group.failure)
        for plan in heard:
            self._apply(self.state.offer(plan.plan, step, plan.checked_for))
        self._take_transfer()
        failing = self.transfers.failing
        if failing is not None:
            self.halt(failing)
        self.state = self.state.at_step(step)

    def vote(self, step: int) -> None:
        """Count the vote that is due at this boundary, and launch the one that begins here or has begun at one missed.

        Raises ``FatalSwitchError`` where the ranks may no longer serve one placement.
        """
        self._step = step
        reformed = self.votes.formed_again(step)
        if reformed is not None:
            self.state = self.state.reformed(reformed.generation, reformed.lane)
            _log.info(
                "rank %d: the ranks vote again from forward pass %d", self._identity.rank, reformed.start
            )
        voter = self.votes.to_count(step)
        if voter is not None:
            self._count_votes(voter)
        ballot_due = self.votes.to_cast(step)
        if ballot_due is not None:
            self._cast_vote(*ballot_due)

    def see_term(self, term: int) -> None:
        """A service of this leader term is connected."""
        self.state = self.state.with_term(term)

    def halt(self, reason: str) -> None:
        """Stop balancing on this rank; it votes on, for aborts."""
        self._apply(self.state.halt(reason))

    def fail(self, reason: str) -> None:
        """This rank serves no more: the others hear of it, and end as well."""
        self._group.fail(f"rank {self._identity.rank}: {reason}")
        self.votes.leave()

    # The end

    def drain(self, reason: str) -> None:
        """Finish or abort what is under way on all ranks, and take no plans until ``resume``.

        A collective, between the same two steps on every rank. Waits for a transfer that runs out, at most until its
        deadline. Where the votes break, what is under way is dropped, as it would be in any step.
        """
        self.state = self.state.with_pause(reason)
        self.budget.open()
        if self.votes.voter is not None and self.votes.voter.box.under_way:
            self._count_votes(self.votes.voter)
        self._vote_until_nobody_holds_a_plan()
        while self.transfers.running and self.transfers.failing is None:
            self._take_transfer()
            time.sleep(_RUN_OUT_POLL_SECONDS)

    def restore(self, target: Placement, reason: str) -> None:
        """Drain, then switch every layer to ``target`` by votes of the same kind; takes no plans until ``resume``.

        A collective like ``drain``. Where it fails, the layers that were not switched serve what they did: the same
        ones on all ranks.
        """
        self.drain(reason)
        installed, groups = self.state.installed, self._identity.token_groups
        plan = restoring_plan(installed, target, groups, self.state.highest_term)
        if plan is None:
            return
        self.state = self.state.resumed()
        self._apply(self.state.offer(plan, self._step, installed.digest))
        self._vote_until_nobody_holds_a_plan()
        self.state = self.state.with_pause(reason)

    def resume(self) -> None:
        """Take plans again."""
        self.budget.refill()
        self.state = self.state.resumed()

    def close(self) -> None:
        """End votes and threads, at a moment of this rank's own.

        Where a vote that could commit a layer is under way, the ranks settle it: nobody commits, unless one has done so
        at this very boundary; then this one does as well. Raises ``FatalSwitchError`` where a rank that may have
        committed does not answer.
        """
        try:
            voter = self.votes.voter
            if voter is not None and voter.box.under_way:
                with self._fatal_where(voter.may_commit):
                    self._apply(self.state.decide(voter.settle(self._step)))
            self.state = self.state.with_pause("the agent was closed")
        finally:
            self.votes.leave()
            self.transfers.close()
            self._group.close()

    # Votes

    def _vote_until_nobody_holds_a_plan(self) -> None:
        """Vote without forward passes in between, until no rank holds a plan or the votes are lost."""
        while (voter := self.votes.voter) is not None:
            self._take_transfer()
            if self.transfers.failing is not None:
                self.halt(self.transfers.failing)
            self._cast_vote(voter, self._step)
            if self.votes.voter is not None and not self._count_votes(voter).plans:
                return
            if self.transfers.running:
                time.sleep(_RUN_OUT_POLL_SECONDS)

    def _cast_vote(self, voter: Voter, forward: int) -> None:
        try:
            voter.cast(replace(self.state.ballot, forward=forward))
        except VoteError as error:
            self._lose_votes(voter, error)

    def _count_votes(self, voter: Voter) -> Outcome:
        """What follows from the vote under way; the outcome that counted."""
        with self._fatal_where(voter.may_commit):
            try:
                outcome = voter.count(self._step, self._clock.exact)
            except VoteError as error:
                return self._lose_votes(voter, error)
            if outcome.result is VoteResult.COMMIT:
                self._switch_layer(voter, outcome)
            else:
                self._apply(self.state.decide(outcome))
        self.votes.counted(outcome)
        return outcome

    def _switch_layer(self, voter: Voter, outcome: Outcome) -> None:
        """Install what was voted in, and serve on only where no rank says that it could not."""
        try:
            self._apply(self.state.decide(outcome))
        except BaseException as error:
            self._group.fail(f"rank {self._identity.rank}: {error}")
            with suppress(VoteError):
                voter.box.all_have_installed(False)
            raise
        self._group.installed = voter.box.number
        try:
            if not voter.box.all_have_installed(True):
                raise FatalSwitchError(self._group.failure or "another rank could not install a layer")
        except VoteError as error:
            self._group.wait_for_installs(voter.box.number)
            self._lose_votes(voter, error)

    @contextmanager
    def _fatal_where(self, a_layer_may_commit: bool) -> Iterator[None]:
        """Between the outcome of such a vote and installed tensors no error may leave this rank serving."""
        try:
            yield
        except FatalSwitchError:
            raise
        except Exception as error:
            if not a_layer_may_commit:
                raise
            raise FatalSwitchError(
                f"a vote that may have committed a layer could not be followed: {error}"
            ) from error

    def _lose_votes(self, voter: Voter, error: VoteError) -> Outcome:
        """The ranks can no longer be heard: settle what the last vote may have decided, then form the votes again."""
        self.votes.voter = None
        try:
            with self._fatal_where(voter.may_commit):
                outcome = voter.settle(self._step)
                self._apply(self.state.decide(outcome))
        finally:
            voter.box.leave()
        if outcome.result is VoteResult.COMMIT:
            self._group.installed = voter.box.number
            self._group.wait_for_installs(voter.box.number)
        if self._group.failure is not None:
            raise FatalSwitchError(self._group.failure)
        _log.warning("rank %d: the votes are lost: %s", self._identity.rank, error)
        self._apply(self.state.lose_votes(str(error)))
        state = self.state
        self.votes.lost(voter, state.installed.version_digest, state.generation, state.lane)
        return outcome

    # What the machine asks for

    def _apply(self, transition: machine.Transition) -> None:
        self.state, asked_for = transition
        for action in asked_for:
            match action:
                case actions.StartTransfer():
                    self._history.transfer(self._step, action)
                    self.transfers.start(action, self._layers[action.layer.layer])
                case actions.Commit():
                    self._commit(action)
                case actions.DropStaging():
                    self._staged = None
                case actions.Accepted():
                    self._report(self._listener.accepted, action.plan_id, action.layer)
                case actions.Refused():
                    self._report(self._listener.refused, action.plan_id, action.reason)
                case actions.Aborted():
                    self.stats.plans_aborted += 1
                    self._history.aborted(self._step, action)
                    self._report(self._listener.aborted, action.plan_id, action.layer, action.reason)
                case actions.Diverged():
                    raise FatalSwitchError(f"rank {self._identity.rank}: {action.reason}")
                case actions.Halted():
                    self._history.halted(self._step, action.reason)
                    _log.error("rank %d: balancing has stopped: %s", self._identity.rank, action.reason)

    def _take_transfer(self) -> None:
        result = self.transfers.poll()
        if result is not None:
            self._transfer_ended(result)

    def _transfer_ended(self, result: TransferResult) -> None:
        self.state = self.state.with_transfer_ended(result.generation, result.error)
        if result.error is not None:
            _log.warning("rank %d: %s", self._identity.rank, result.error)
        elif result.generation == self.state.generation and self.state.progress == Progress.READY:
            self._staged = result
            plan = self.state.plan_under_way
            assert plan is not None
            self._report(self._listener.transferred, *plan, result.bytes_received, result.seconds)

    def _commit(self, commit: actions.Commit) -> None:
        """Switch one layer, in place, between two steps; whatever fails before it is in place is fatal."""
        held, self._staged = self._staged, None
        staged = staged_for(commit, held)
        self._report(self._listener.before_commit, commit.before.layer_epochs)
        written, seconds = self._layer_commit.install(commit.layer, staged)
        done = Committed(commit.plan_id, commit.layer.layer, commit.after, written, staged.seconds, seconds)
        self.stats.count(done, len(staged.slots))
        self._history.committed(self._step, commit)
        self._report(self._listener.committed, done)

    def _report(self, report: Callable[..., None], *facts: object) -> None:
        """A listener that fails stops balancing, never a switch that is half done."""
        try:
            report(*facts)
        except Exception as error:
            _log.exception("rank %d: the agent failed; the model goes on", self._identity.rank)
            self.halt(f"{type(error).__name__}: {error}")
