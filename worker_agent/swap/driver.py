"""Carries out what the switch machine asks for: votes, transfers, commits, on the model's thread and beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from eplb_core.placement import Placement, staging_rows
from eplb_core.wire.agent import CallOff, PlanState, PlanStatus
from eplb_core.wire.plan import RankLayer
from worker_agent.forward_clock import ForwardClock
from worker_agent.live_layer import LiveLayer
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.lane import lost_lanes
from worker_agent.swap.machine import (
    Commit,
    Halted,
    Progress,
    StartTransfer,
    SwitchState,
    Transition,
    VoteOutcome,
    VoteResult,
)
from worker_agent.swap.rank_layout import Order, RankLayout, restoring_plan
from worker_agent.swap.record import History
from worker_agent.swap.rendezvous import Rendezvous
from worker_agent.swap.replica_check import ReplicaCheck
from worker_agent.swap.staging import install_layer
from worker_agent.swap.table_check import TableCheck
from worker_agent.swap.transfer import ByteBudget, StagedLayer, TransferResult, TransferWorker
from worker_agent.swap.vote import Voter, VoteSchedule
from worker_agent.swap.vote_link import VoteError

_log = logging.getLogger("eplb.agent")

_RUN_OUT_POLL_SECONDS = 0.005
_OFFER_DEADLINE_STEPS = 512
"""Steps after which a plan that not all ranks hold is dropped."""


@dataclass
class SwitchStats:
    """Switches of this rank since its start.

    ``install_seconds`` is the time that the rank spent copying experts and tables into place, or queueing the copies.
    ``commit_seconds`` is the time for which commits paused the model, from the outcome of a vote until all ranks had
    installed its part.
    """

    layers_switched: int = 0
    experts_received: int = 0
    bytes_received: int = 0
    plans_aborted: int = 0
    install_seconds: float = 0.0
    commit_seconds: float = 0.0
    transfer_seconds: float = 0.0


class SwitchDriver:
    """Switch of one rank, with its threads and links.

    ``on_status`` takes what became of plans, for the service; ``before_commit`` is called with the epochs of all layers
    just before one of them switches, ``on_commit`` with the index of one that has just been installed.
    """

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: AgentSettings,
        rendezvous: Rendezvous,
        clock: ForwardClock,
        history: History,
        on_status: Callable[[PlanStatus], None],
        before_commit: Callable[[tuple[int, ...]], None],
        on_commit: Callable[[int], None] | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        self.stats = SwitchStats()
        self._committing = False
        shape = rendezvous.identity.shape
        rows = staging_rows(shape.slots, shape.bytes_per_expert, settings.staging_mib << 20)
        self.state = SwitchState(rendezvous.installed, _OFFER_DEADLINE_STEPS, rows)
        self.budget = ByteBudget(settings.bytes_per_step, runtime, settings.link_share)
        self.votes = VoteSchedule(rendezvous, settings, clock, history, runtime)
        self._lanes = rendezvous.lanes
        self._replicas = ReplicaCheck(layers, self._served, rendezvous.group.peers, runtime)
        rendezvous.group.checksum = self._replicas.known
        self.transfers = TransferWorker(rendezvous.lanes, settings, self.budget, runtime, self._replicas)
        if rendezvous.lanes.device.type != "cpu":
            self.transfers.reserve(layers[0].expert_weights(), rows)
        self._layers = layers
        self._tables = TableCheck(layers)
        self._runtime = runtime
        self._settings = settings
        self._identity = rendezvous.identity
        self._group = rendezvous.group
        self._clock = clock
        self._history = history
        self._on_status = on_status
        self._before_commit = before_commit
        self._on_commit = on_commit
        self._step = 0
        self._staged: TransferResult | None = None
        self._committed: list[tuple[PlanStatus, RankLayout]] = []
        """Statuses to report once all ranks have installed the part, each with the placement that it resulted in."""
        self._trouble: str | None = None

    @property
    def complaint(self) -> str | None:
        """Last problem of a thread that went on, or ``None``."""
        return lost_lanes() or self._replicas.complaint or self._group.peers.complaint

    # What happens at a step boundary, in order

    def take_events(self, step: int, orders: Sequence[Order]) -> None:
        """Apply the service's orders that have arrived by step boundary ``step``."""
        self._step = step
        if self._group.failure is not None:
            raise FatalSwitchError(self._group.failure)
        wrong = self.transfers.damaged
        if self.state.paused is None:
            wrong = wrong or self._tables.at_boundary(step, self.state.installed)
        if wrong is not None:
            raise FatalSwitchError(f"rank {self._identity.rank}: {wrong}")
        for order in orders:
            if isinstance(order, CallOff):
                self._apply(self.state.call_off(order.plan_id))
            else:
                plan, checked_for = order
                self._apply(self.state.offer(plan, step, checked_for))
        self._take_transfer()
        self._watch_transfers()
        self.state = self.state.at_step(step)
        if self.votes.rest():
            # Passes have other numbers from here on.
            self._unless_it_fails(self._before_commit, self.state.installed.layer_epochs)
        trouble, self._trouble = self._trouble or self.votes.trouble, None
        if trouble is not None:
            self.stumble(trouble)

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
        """Note that a service of this leader term is connected."""
        self.state = self.state.with_term(term)

    def stumble(self, reason: str) -> None:
        """Something has failed on this rank, away from a commit: all ranks form the votes again, later each time.

        What the vote under way may commit is settled first. Raises ``FatalSwitchError`` where that cannot be.
        """
        if self.votes.voter is not None:
            self._lose_votes(self.votes.voter, reason)

    def fail(self, reason: str) -> None:
        """This rank serves no more: the others hear of it, and end as well."""
        rank = f"rank {self._identity.rank}: "
        self._group.fail(rank + reason.removeprefix(rank))
        self.votes.leave()

    # The end

    def pause(self, reason: str) -> None:
        """Vote the plan under way down, and take no other until ``resume``."""
        self.state = self.state.with_pause(reason)

    def drain(self, reason: str) -> None:
        """Finish or abort what is under way on all ranks, and take no plans until ``resume``; a collective.

        Waits for a transfer that runs out, at most until its deadline. Where the votes break, all that is under way is
        dropped.
        """
        self.state = self.state.with_pause(reason)
        self.budget.open()
        if self.votes.voter is not None and self.votes.voter.under_way:
            self._count_votes(self.votes.voter)
        self._vote_until_nobody_holds_a_plan()
        while self.transfers.running and self.transfers.failing is None:
            self._take_transfer()
            self._runtime.sleep(_RUN_OUT_POLL_SECONDS)
        self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        """Wait until no thread reads a live expert, at most for the transfer timeout because a device may hang."""
        end = self._runtime.now() + self._settings.transfer_timeout_seconds
        while self._replicas.reading:
            if self._runtime.now() > end:
                _log.error(
                    "rank %d: the replica check is still reading a live expert after %g s; no longer waiting for it",
                    self._identity.rank,
                    self._settings.transfer_timeout_seconds,
                )
                return
            self._runtime.sleep(_RUN_OUT_POLL_SECONDS)

    def restore(self, target: Placement, reason: str) -> None:
        """Drain, then switch every layer to ``target`` by votes of the same kind; take no plans until ``resume``.

        Where it fails, the layers that were not switched serve what they did: the same ones on all ranks.
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
        self._wait_for_reader()

    def resume(self) -> None:
        """Take plans again; weights may have changed since the drain."""
        self._replicas.forget()
        self.budget.refill()
        self.state = self.state.resumed()

    def close(self) -> None:
        """End votes and threads, without waiting for other ranks to do so.

        Where a vote that could commit a layer is under way, the ranks settle it: nobody commits, unless one has done so
        at this very boundary; then this one does as well. Raises ``FatalSwitchError`` where a rank that may have
        committed does not answer.
        """
        try:
            voter = self.votes.voter
            if voter is not None and voter.under_way:
                began = self._runtime.now()
                with self._fatal_where(voter.may_commit):
                    self._apply(self.state.decide(voter.settle(self._step)))
                self._report_commits(began)
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
            self._watch_transfers()
            if self.votes.voter is voter:
                self._cast_vote(voter, self._step)
            if self.votes.voter is not None and not self._count_votes(voter).plans:
                return
            if self.transfers.running:
                self._runtime.sleep(_RUN_OUT_POLL_SECONDS)

    def _cast_vote(self, voter: Voter, forward: int) -> None:
        try:
            voter.cast(replace(self.state.ballot, forward=forward))
        except VoteError as error:
            self._lose_votes(voter, str(error))

    def _count_votes(self, voter: Voter) -> VoteOutcome:
        """Count the vote under way and do what follows from it; return the outcome that counted."""
        with self._fatal_where(voter.may_commit):
            try:
                outcome = voter.count(self._step, self._clock.exact)
            except VoteError as error:
                return self._lose_votes(voter, str(error))
            if outcome.result is VoteResult.COMMIT:
                self._switch_part(voter, outcome)
            else:
                self._apply(self.state.decide(outcome))
        if self.votes.voter is voter and (astray := self.votes.counted(outcome)) is not None:
            self._lose_votes(voter, astray)
        return outcome

    def _switch_part(self, voter: Voter, outcome: VoteOutcome) -> None:
        """Install the part that was voted in; keep serving only if no rank reports that it failed to."""
        try:
            self._apply(self.state.decide(outcome))
        except BaseException as error:
            self._group.fail(f"rank {self._identity.rank}: {str(error) or repr(error)}")
            with suppress(VoteError):
                voter.all_have_installed(False)
            raise
        self._group.installed = voter.number
        try:
            if not voter.all_have_installed(True):
                raise FatalSwitchError(self._group.failure or "another rank could not install a layer")
        except VoteError as error:
            self._group.wait_for_installs(voter.number)
            self._report_commits(voter.heard_at)
            self._lose_votes(voter, str(error))
        else:
            self._report_commits(voter.heard_at)

    @contextmanager
    def _fatal_where(self, a_layer_may_commit: bool) -> Iterator[None]:
        """Between the outcome of such a vote and installed tensors no error may leave this rank serving."""
        try:
            yield
        except FatalSwitchError:
            raise
        except BaseException as error:
            if not a_layer_may_commit:
                raise
            reason = f"a vote that may have committed a layer could not be followed: {error!r}"
            if not isinstance(error, Exception):
                # An interrupt goes its way; a host that survives it must not serve on, nor must its peers.
                self._group.fail(f"rank {self._identity.rank}: {reason}")
                raise
            raise FatalSwitchError(reason) from error

    def _lose_votes(self, voter: Voter, reason: str) -> VoteOutcome:
        """Leave the votes: settle what the last one may have decided, then form them again with the other ranks."""
        began = self._runtime.now()
        try:
            with self._fatal_where(voter.may_commit):
                outcome = voter.settle(self._step)
                self._apply(self.state.decide(outcome))
                if outcome.result is VoteResult.COMMIT:
                    self._group.installed = voter.number
            if outcome.result is VoteResult.COMMIT:
                # Only while this rank still votes can it distinguish a late peer from one that is gone.
                self._group.wait_for_installs(voter.number)
                self._report_commits(began)
        finally:
            voter.leave()
        if self._group.failure is not None:
            raise FatalSwitchError(self._group.failure)
        _log.warning("rank %d: the votes are lost: %s", self._identity.rank, reason)
        self._apply(self.state.lose_votes(reason))
        self.votes.lost(voter, self.state)
        return outcome

    # What the machine asks for

    def _apply(self, transition: Transition) -> None:
        after, actions = transition
        # Until its copies are done, the slots hold other experts than the new state names.
        self._committing = any(isinstance(action, Commit) for action in actions)
        self.state = after
        for action in actions:
            if not isinstance(action, Commit):
                self._history.action(self._step, action)
            match action:
                case StartTransfer():
                    self.transfers.start(action, [self._layers[layer.layer] for layer in action.layers])
                case Commit():
                    self._commit(action)
                    self._committing = False
                case Halted():
                    raise FatalSwitchError(f"rank {self._identity.rank}: {action.reason}")
                case PlanStatus():
                    if action.state.drops_layers and self.state.plan is None:
                        self._staged = None
                    self.stats.plans_aborted += action.state is PlanState.ABORTED
                    self._report(action)

    def _watch_transfers(self) -> None:
        """Replace a transfer thread that has died or hangs: what it may still do is of a lane that nobody uses."""
        failing = self.transfers.failing
        if failing is not None:
            self.transfers = TransferWorker(
                self._lanes.another(), self._settings, self.budget, self._runtime, self._replicas
            )
            self.state = self.state.with_transfer_ended(self.state.generation, failing)
            self.stumble(failing)
        elif self.state.transfer_runs and not self.transfers.running:
            # An error on this thread, between the two, has kept it from being started or its end from being noted.
            self.state = self.state.with_transfer_ended(self.state.generation, "the transfer came to nothing")

    def _take_transfer(self) -> None:
        result = self.transfers.poll()
        if result is None:
            return
        self.state = self.state.with_transfer_ended(result.generation, result.error)
        if result.error is not None:
            _log.warning("rank %d: %s", self._identity.rank, result.error)
        elif result.generation == self.state.generation and self.state.progress == Progress.READY:
            self._staged = result
            assert self.state.plan is not None
            for layer in result.layers:
                self._report(
                    PlanStatus(
                        self.state.plan.plan_id,
                        PlanState.TRANSFERRED,
                        layer.layer,
                        bytes_received=layer.bytes_received,
                        transfer_seconds=layer.seconds,
                    )
                )

    def _commit(self, commit: Commit) -> None:
        """Switch the layers of a part, in place, between two steps; a failure before all are in place is fatal."""
        result = self._staged
        self._staged = None
        names = [layer.layer for layer in commit.layers]
        staged = [] if result is None or result.generation != commit.generation else result.layers
        if [layer.layer for layer in staged] != names:
            raise FatalSwitchError(
                f"layers {names} were voted in, but their weights are not staged on this rank"
            )
        self._unless_it_fails(self._before_commit, commit.before.layer_epochs)
        for update, rows, installed in zip(commit.layers, staged, commit.installed, strict=True):
            self._install(commit, update, rows, installed)
        self._history.action(self._step, commit)

    def _install(self, commit: Commit, update: RankLayer, rows: StagedLayer, installed: RankLayout) -> None:
        """Switch one layer of a part; ``installed`` is the placement that results."""
        layer = update.layer
        live = self._layers[layer]
        self._unless_it_fails(self._tables.before_commit, layer, self._step, commit.before)
        began = self._runtime.now()
        written = install_layer(
            live, update, self._identity.rank, rows.staged, rows.slots, on_commit=self._on_commit
        )
        self.stats.install_seconds += self._runtime.now() - began
        self._replicas.committed(layer)
        self.transfers.check(layer, live, rows.sums)
        self.stats.layers_switched += 1
        self.stats.experts_received += len(rows.slots)
        self.stats.bytes_received += written
        self.stats.transfer_seconds += rows.seconds
        status = PlanStatus(
            commit.plan_id,
            PlanState.COMMITTED,
            layer,
            bytes_received=written,
            transfer_seconds=rows.seconds,
        )
        self._committed.append((status, installed))

    def _report_commits(self, began: float) -> None:
        """Report the layers just committed, now that all ranks serve them.

        The model has been paused since ``began``. Each layer is charged an equal share of that time, which includes the
        wait for the device, the copies, and the messages with which the ranks confirm the commit.
        """
        committed = self._committed
        self._committed = []
        seconds = self._runtime.now() - began
        for status, installed in committed:
            self.stats.commit_seconds += seconds / len(committed)
            self._report(replace(status, commit_seconds=seconds / len(committed)), installed)

    def _served(self) -> RankLayout | None:
        return self.state.installed if self.state.paused is None and not self._committing else None

    def _report(self, status: PlanStatus, served: RankLayout | None = None) -> None:
        served = served or self.state.installed
        whole = replace(status, step=self._step, epoch=served.epoch, digest=served.digest)
        self._unless_it_fails(self._on_status, whole)

    def _unless_it_fails(self, call: Callable[..., None], *facts: object) -> None:
        """Call someone outside the switch: where that fails the votes are formed again, after what is under way."""
        try:
            call(*facts)
        except Exception as error:
            _log.exception("rank %d: the agent failed; the model goes on", self._identity.rank)
            self._trouble = f"{type(error).__name__}: {error}"
