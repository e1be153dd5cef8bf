"""Drives the switch's state machine: feeds it events and carries out its actions.

Votes and commits run on the model's thread, and transfers on a separate thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

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

_POLL_SECONDS = 0.005
"""Interval at which the model's thread polls other threads while the model is paused."""
_OFFER_DEADLINE_STEPS = 512
"""Number of steps after which a plan that has not reached every rank is dropped."""


@dataclass
class SwitchStats:
    """Totals over this rank's switches since the agent started.

    Parameters
    ----------
    layers_switched
        Number of committed layers.
    experts_received
        Number of experts received and installed.
    bytes_received
        Total size of these experts in bytes.
    plans_aborted
        Number of aborted plans.
    install_seconds
        Time that this rank spent copying experts and tables into live layers or, on a device, queueing the copies.
    commit_seconds
        Time for which commits paused the model, from each vote's outcome until all ranks had installed the part.
    transfer_seconds
        Total duration of the transfers whose parts were committed.
    """

    layers_switched: int = 0
    experts_received: int = 0
    bytes_received: int = 0
    plans_aborted: int = 0
    install_seconds: float = 0.0
    commit_seconds: float = 0.0
    transfer_seconds: float = 0.0


class SwitchCallbacks(NamedTuple):
    """The agent's callbacks for events of the layer switch."""

    on_status: Callable[[PlanStatus], None]
    """Called with each plan status to send to the service."""
    before_commit: Callable[[tuple[int, ...]], None]
    """Called with the epochs of all layers just before any layer is switched."""
    on_commit: Callable[[int], None] | None = None
    """Called with the index of each layer that has just been installed."""


class SwitchDriver:
    """Layer switch of one rank, with its threads and links.

    Parameters
    ----------
    layers
        This rank's live layers.
    settings
        The agent's settings.
    rendezvous
        The group, its links and the initial layout.
    clock
        Counter of forward passes.
    history
        Record of this rank's votes and actions.
    callbacks
        Functions that the switch calls.
    runtime
        Clock and threads to use.

    Attributes
    ----------
    state
        Current state of the state machine.
    stats
        Totals since the agent started.
    budget
        Byte budget for transfers.
    votes
        Vote schedule.
    transfers
        Thread that carries out transfers.
    """

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: AgentSettings,
        rendezvous: Rendezvous,
        clock: ForwardClock,
        history: History,
        callbacks: SwitchCallbacks,
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
        self._replicas = ReplicaCheck(layers, self._stable_layout, rendezvous.group.peers, runtime)
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
        self._on_status, self._before_commit, self._on_commit = callbacks
        self._step = 0
        self._staged: TransferResult | None = None
        self._unreported_commits: list[tuple[PlanStatus, RankLayout]] = []
        """Statuses to report once all ranks have installed the part, each with the layout after its layer's commit."""
        self._trouble: str | None = None
        """Reason to open a new vote link at the next step boundary, or ``None``."""

    @property
    def complaint(self) -> str | None:
        """Current problem with the lanes, the live experts or the links to peers, or ``None``."""
        return lost_lanes() or self._replicas.complaint or self._group.peers.complaint

    # Methods called at each step boundary, in this order

    def process_events(self, step: int, orders: Sequence[Order]) -> None:
        """Process all events since the last step boundary, except for votes.

        Parameters
        ----------
        step
            Current step.
        orders
            Orders received from the service.

        Raises
        ------
        FatalSwitchError
            If any rank has failed, or this rank's weights or tables are corrupted.
        """
        self._step = step
        if self._group.failure is not None:
            raise FatalSwitchError(self._group.failure)
        damage = self.transfers.damaged
        if self.state.paused is None:
            damage = damage or self._tables.at_boundary(step, self.state.installed)
        if damage is not None:
            raise FatalSwitchError(f"rank {self._identity.rank}: {damage}")
        for order in orders:
            if isinstance(order, CallOff):
                self._apply(self.state.call_off(order.plan_id))
            else:
                plan, checked_for = order
                self._apply(self.state.offer(plan, step, checked_for))
        self._poll_transfer()
        self._watch_transfers()
        self.state = self.state.at_step(step)
        if self.votes.rest():
            # Heat recorded so far must be reported under the old pass numbers.
            self._call_guarded(self._before_commit, self.state.installed.layer_epochs)
        trouble = self._trouble or self.votes.trouble
        self._trouble = None
        if trouble is not None:
            self.stumble(trouble)

    def vote(self, step: int) -> None:
        """Count the vote that is due at this boundary, and cast a ballot if one is due now or was missed.

        Raises ``FatalSwitchError`` if the ranks may no longer have the same layout.
        """
        self._step = step
        reformation = self.votes.formed_again(step)
        if reformation is not None:
            self.state = self.state.reformed(reformation.generation, reformation.lane)
            _log.info(
                "rank %d: voting resumes at forward pass %d",
                self._identity.rank,
                reformation.start,
            )
        voter = self.votes.to_count(step)
        if voter is not None:
            self._count_votes(voter)
        ballot_due = self.votes.to_cast(step)
        if ballot_due is not None:
            self._cast_vote(*ballot_due)

    def record_term(self, term: int) -> None:
        """Record the leader term of the connected service."""
        self.state = self.state.with_term(term)

    def stumble(self, reason: str) -> None:
        """Leave the vote link after a failure outside a commit. All ranks then open a new link, with increasing delays.

        If the vote in progress may commit a layer, it is settled first. Raises ``FatalSwitchError`` if that fails.
        """
        if self.votes.voter is not None:
            self._lose_votes(self.votes.voter, reason)

    def fail(self, reason: str) -> None:
        """Stop serving on this rank and on all peers."""
        prefix = f"rank {self._identity.rank}: "
        self._group.fail(prefix + reason.removeprefix(prefix))
        self.votes.leave()

    # Pausing and closing

    def pause(self, reason: str) -> None:
        """Vote to abort the plan in progress, and reject plans until ``resume`` is called."""
        self.state = self.state.with_pause(reason)

    def drain(self, reason: str) -> None:
        """Finish or abort the plan in progress on all ranks, and reject plans until ``resume`` is called.

        This is a collective. It waits for a running transfer to end, but not beyond the transfer's deadline. If the
        vote link breaks, the plan is dropped.
        """
        self.state = self.state.with_pause(reason)
        self.budget.open()
        if self.votes.voter is not None and self.votes.voter.under_way:
            self._count_votes(self.votes.voter)
        self._vote_until_idle()
        while self.transfers.running and self.transfers.failing is None:
            self._poll_transfer()
            self._runtime.sleep(_POLL_SECONDS)
        self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        """Wait until no thread reads a live expert, but not beyond the transfer timeout, because a device may hang."""
        end = self._runtime.now() + self._settings.transfer_timeout_seconds
        while self._replicas.reading:
            if self._runtime.now() > end:
                _log.error(
                    "rank %d: the replica check is still reading a live expert after %g s; no longer waiting for it",
                    self._identity.rank,
                    self._settings.transfer_timeout_seconds,
                )
                return
            self._runtime.sleep(_POLL_SECONDS)

    def restore(self, target: Placement, reason: str) -> None:
        """Drain, switch every layer to ``target`` with the usual votes, and reject plans until ``resume`` is called.

        If this fails, the remaining layers keep their placement. The set of remaining layers is the same on all ranks.
        """
        self.drain(reason)
        installed = self.state.installed
        plan = restoring_plan(installed, target, self._identity.token_groups, self.state.highest_term)
        if plan is None:
            return
        self.state = self.state.resumed()
        self._apply(self.state.offer(plan, self._step, installed.digest))
        self._vote_until_idle()
        self.state = self.state.with_pause(reason)
        self._wait_for_reader()

    def resume(self) -> None:
        """Resume accepting plans. The host may have changed weights since the drain."""
        self._replicas.forget()
        self.budget.refill()
        self.state = self.state.resumed()

    def close(self) -> None:
        """Stop voting, and stop all threads, without waiting for other ranks to do so.

        If a vote that could commit a layer is in progress, the ranks settle it. A rank commits only if a peer has
        already committed at the same boundary. Raises ``FatalSwitchError`` if a rank that may have committed does not
        answer.
        """
        try:
            voter = self.votes.voter
            if voter is not None and voter.under_way:
                paused_at = self._runtime.now()
                self._settle(voter)
                self._report_commits(paused_at)
            self.state = self.state.with_pause("the agent was closed")
        finally:
            self.votes.leave()
            self.transfers.close()
            self._group.close()

    # Votes

    def _vote_until_idle(self) -> None:
        """Vote without forward passes in between, until no rank holds a plan or the vote link is lost."""
        while (voter := self.votes.voter) is not None:
            self._poll_transfer()
            self._watch_transfers()
            if self.votes.voter is voter:
                self._cast_vote(voter, self._step)
            if self.votes.voter is not None and not self._count_votes(voter).plans:
                return
            if self.transfers.running:
                self._runtime.sleep(_POLL_SECONDS)

    def _cast_vote(self, voter: Voter, forward: int) -> None:
        try:
            voter.cast(replace(self.state.ballot, forward=forward))
        except VoteError as error:
            self._lose_votes(voter, str(error))

    def _count_votes(self, voter: Voter) -> VoteOutcome:
        """Count the vote in progress, carry out its outcome, and return the outcome."""
        with self._fatal_if(voter.may_commit):
            try:
                outcome = voter.count(self._step, self._clock.exact)
            except VoteError as error:
                return self._lose_votes(voter, str(error))
            if outcome.result is VoteResult.COMMIT:
                self._switch_part(voter, outcome)
            else:
                self._apply(self.state.decide(outcome))
        if self.votes.voter is voter and (reason := self.votes.counted(outcome)) is not None:
            self._lose_votes(voter, reason)
        return outcome

    def _switch_part(self, voter: Voter, outcome: VoteOutcome) -> None:
        """Install the part that the vote committed. Stop serving if any rank reports a failed install."""
        try:
            self._apply(self.state.decide(outcome))
        except BaseException as error:
            self._group.fail(f"rank {self._identity.rank}: {str(error) or repr(error)}")
            with suppress(VoteError):
                voter.all_have_installed(False)
            raise
        self._group.installed_vote = voter.number
        lost: VoteError | None = None
        try:
            installed = voter.all_have_installed(True)
        except VoteError as error:
            installed, lost = None, error
        if installed is False:
            raise FatalSwitchError(self._group.failure or "another rank could not install a layer")
        if installed is None:
            self._group.wait_for_installs(voter.number)
        self._report_commits(voter.ballots_at)
        if lost is not None:
            self._lose_votes(voter, str(lost))

    @contextmanager
    def _fatal_if(self, may_commit: bool) -> Iterator[None]:
        """Convert any error into a ``FatalSwitchError`` if the vote may commit a layer.

        This rank must not keep serving after an error between the vote's outcome and the install.
        """
        try:
            yield
        except (FatalSwitchError, GeneratorExit):
            # The generator is closed if an error occurs just outside the block. That error is not fatal, because the
            # outcome is either unknown and will be settled later, or has been applied completely.
            raise
        except BaseException as error:
            if not may_commit:
                raise
            reason = f"this rank could not apply a vote that may have committed a layer: {error!r}"
            if not isinstance(error, Exception):
                # Re-raise an interrupt unchanged. Even if the host survives it, neither this rank nor its peers may
                # keep serving.
                self._group.fail(f"rank {self._identity.rank}: {reason}")
                raise
            raise FatalSwitchError(reason) from error

    def _settle(self, voter: Voter) -> VoteOutcome:
        """Settle the last vote, carry out its outcome, and return the outcome."""
        with self._fatal_if(voter.may_commit):
            outcome = voter.settle(self._step)
            self._apply(self.state.decide(outcome))
            if outcome.result is VoteResult.COMMIT:
                self._group.installed_vote = voter.number
        return outcome

    def _lose_votes(self, voter: Voter, reason: str) -> VoteOutcome:
        """Settle the last vote, leave its link, and start opening a new one. Return the vote's outcome."""
        paused_at = self._runtime.now()
        try:
            outcome = self._settle(voter)
            if outcome.result is VoteResult.COMMIT:
                # Once this rank leaves the vote link, it can no longer distinguish a late peer from one that is gone.
                self._group.wait_for_installs(voter.number)
                self._report_commits(paused_at)
        finally:
            voter.leave()
        if self._group.failure is not None:
            raise FatalSwitchError(self._group.failure)
        _log.warning("rank %d: lost the vote link: %s", self._identity.rank, reason)
        self._apply(self.state.lose_votes(reason))
        self.votes.lost(voter, self.state)
        return outcome

    # Actions of the state machine

    def _apply(self, transition: Transition) -> None:
        """Adopt a transition's new state, and carry out its actions."""
        after, actions = transition
        # Until a commit's copies are complete, the slots do not match the new state.
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
        """Replace a transfer thread that has died or hung. Its lane is abandoned, so it can do no more harm."""
        failure = self.transfers.failing
        if failure is not None:
            self.transfers = TransferWorker(
                self._lanes.another(), self._settings, self.budget, self._runtime, self._replicas
            )
            self.state = self.state.with_transfer_ended(self.state.generation, failure)
            self.stumble(failure)
        elif self.state.transfer_runs and not self.transfers.running:
            # An error on the model's thread kept the transfer from starting or its result from being recorded.
            self.state = self.state.with_transfer_ended(self.state.generation, "the transfer has no result")

    def _poll_transfer(self) -> None:
        """If a transfer has ended, record its result and report its layers."""
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
        """Install all layers of a part in place, between two steps. A failure part-way through is fatal."""
        result = self._staged
        self._staged = None
        indices = [layer.layer for layer in commit.layers]
        staged = [] if result is None or result.generation != commit.generation else result.layers
        if [layer.layer for layer in staged] != indices:
            raise FatalSwitchError(
                f"a vote committed layers {indices}, but their weights are not staged on this rank"
            )
        self._call_guarded(self._before_commit, commit.before.layer_epochs)
        for update, rows, installed in zip(commit.layers, staged, commit.installed, strict=True):
            self._install(commit, update, rows, installed)
        self._history.action(self._step, commit)

    def _install(self, commit: Commit, update: RankLayer, rows: StagedLayer, installed: RankLayout) -> None:
        """Install one layer of a part.

        Parameters
        ----------
        commit
            The part's commit.
        update
            The layer's new placement and table.
        rows
            The layer's staged experts.
        installed
            Layout after the layer's commit.
        """
        layer = update.layer
        live = self._layers[layer]
        self._call_guarded(self._tables.before_commit, layer, self._step, commit.before)
        start = self._runtime.now()
        written = install_layer(
            live, update, self._identity.rank, rows.staged, rows.slots, on_commit=self._on_commit
        )
        self.stats.install_seconds += self._runtime.now() - start
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
        self._unreported_commits.append((status, installed))

    def _report_commits(self, paused_at: float) -> None:
        """Report the layers that have just been committed, once all ranks serve them.

        The model has been paused since ``paused_at``. That time includes the wait for the device, the copies, and the
        messages that confirm the commit. Each layer is charged an equal share.
        """
        commits = self._unreported_commits
        self._unreported_commits = []
        seconds = self._runtime.now() - paused_at
        for status, installed in commits:
            self.stats.commit_seconds += seconds / len(commits)
            self._report(replace(status, commit_seconds=seconds / len(commits)), installed)

    def _stable_layout(self) -> RankLayout | None:
        """Return the current layout, or ``None`` if the host or a commit may be writing to the weights."""
        return self.state.installed if self.state.paused is None and not self._committing else None

    def _report(self, status: PlanStatus, installed: RankLayout | None = None) -> None:
        """Report a status together with the step and the version of ``installed``, by default the current layout."""
        layout = installed or self.state.installed
        versioned = replace(status, step=self._step, epoch=layout.epoch, digest=layout.digest)
        self._call_guarded(self._on_status, versioned)

    def _call_guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """Call code outside the switch. If it fails, complete the current action before opening a new vote link."""
        try:
            call(*arguments)
        except Exception as error:
            _log.exception("rank %d: the agent failed; the model keeps serving", self._identity.rank)
            self._trouble = f"{type(error).__name__}: {error}"
