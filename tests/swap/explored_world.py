"""Model of three ranks, two plans and every fault, small enough to explore exhaustively.

The state machines are the real ones. The rest of an agent (votes, register, transfers, staging, commit) is modelled
after ``swap/driver.py``. The checks in ``promises.py`` run after each event.
"""

from __future__ import annotations

from collections.abc import Iterator

from eplb_core.wire.agent import PlanState, PlanStatus
from tests.exploring import Event, happen, must
from tests.swap.explored_state import OFFER_DEADLINE, RANKS, Running, State, Vote
from tests.swap.promises import check_accepted, check_called, check_commit, check_start, check_state
from tests.swap.tags import FIRST
from worker_agent.swap.commit_register import Settlement, Verdict
from worker_agent.swap.machine import (
    Commit,
    Halted,
    Progress,
    StartTransfer,
    Transition,
    VoteOutcome,
    VoteResult,
)


class World(State):
    """A state, the events that are possible in it (``events``), and the state after each event (``after``)."""

    def events(self) -> Iterator[Event]:
        """Yield every event that is possible in this state."""
        for rank, machine in enumerate(self.machines):
            for number, plan in enumerate(self.scenario.plans):
                yield ("deliver", rank, number, machine.installed.digest)
                if plan.base_digest == machine.installed.digest != FIRST.digest:
                    yield ("deliver", rank, number, FIRST.digest)
                if self.faults.calls and not machine.called_off:
                    yield ("call", rank, number)
            if machine.progress == Progress.OFFERED and machine.abort_wish is None:
                yield ("deadline", rank)
            if self.transfers[rank] is not None:
                possible = self._can_complete(rank)
                if possible:
                    yield ("staged", rank)
                if self.faults.transfers or not possible:
                    yield ("failed", rank)
            if self.faults.errors and rank not in self.lost and not self.fatal:
                yield ("error", rank)
            if self.vote is not None and rank in self.vote.settling:
                settlement = self.vote.settlements[rank]
                for peer in sorted(settlement.peers - settlement.in_doubt):
                    yield ("ask", rank, peer)
                    if self.faults.refusals:
                        yield ("refused", rank, peer)
                    if self.faults.presumptions:
                        yield ("presume", rank, peer)
            elif self.vote is not None and rank in self.vote.pending:
                if None not in self.vote.ballots:
                    yield ("heard", rank)
                if self.faults.losses or None in self.vote.ballots:
                    yield ("unheard", rank)
                if self.faults.skips and self.vote.confirmed is None:
                    yield ("skip", rank)
                if self.faults.impatience and self._commits:
                    yield ("impatient", rank)
                if (
                    self.faults.drifts
                    and self.vote.confirmed is None
                    and not self.ahead[rank]
                    and self._commits
                ):
                    yield ("drift", rank)
                if self.faults.installs and rank not in self.broken:
                    yield ("broken", rank)
        if self.vote is None and len(self.lost) < RANKS and not self.fatal:
            yield ("launch",)
        if self.vote is None and len(self.lost) == RANKS and not self.fatal:
            yield ("reform",)

    def after(self, event: Event) -> World:
        """Return the successor state. Raises ``Broken`` if it violates an invariant."""
        world: World = self.copy()
        kind, *arguments = event
        happen(getattr(world, f"_{kind}"), *arguments)
        check_state(world)
        return world

    @property
    def settled(self) -> bool:
        """True if every rank has stopped, or if no plan, transfer or vote is in progress."""
        idle = all(m.progress == Progress.IDLE for m in self.machines) or len(self.lost) == RANKS
        return len(self.fatal) == RANKS or (idle and self.vote is None and not any(self.transfers))

    @staticmethod
    def needs_no_fault(event: Event) -> bool:
        """Return True if the event will eventually happen without further faults."""
        return event[0] in ("deadline", "staged", "failed", "heard", "unheard", "ask", "launch", "reform")

    # Events

    def _deliver(self, rank: int, number: int, checked_for: int) -> None:
        plan = self.scenario.plans[number]
        machine = self.machines[rank]
        accepted, actions = machine.offer(plan, 0, checked_for)
        if any(isinstance(action, PlanStatus) and action.state is PlanState.ACCEPTED for action in actions):
            check_accepted(self, rank, plan, checked_for)
            self.terms[rank] = plan.leader_term
        self.machines[rank] = accepted

    def _call(self, rank: int, number: int) -> None:
        """Deliver a call-off to the rank, even if it does not hold that plan."""
        self.faults = self.faults._replace(calls=self.faults.calls - 1)
        machine = self.machines[rank]
        plan = self.scenario.plans[number]
        called, actions = machine.call_off(plan.plan_id)
        check_called(machine, called, plan)
        self._act(rank, (called, actions))

    def _deadline(self, rank: int) -> None:
        self.machines[rank] = self.machines[rank].at_step(OFFER_DEADLINE + 1)

    def _staged(self, rank: int) -> None:
        running = self.transfers[rank]
        self.transfers[rank] = None
        machine = self.machines[rank] = self.machines[rank].with_transfer_ended(running.generation)
        # Like the driver, discard the result of an earlier transfer.
        if running.generation == machine.generation and machine.progress == Progress.READY:
            self.staged[rank] = running

    def _failed(self, rank: int) -> None:
        running = self.transfers[rank]
        if self._can_complete(rank):
            self.faults = self.faults._replace(transfers=self.faults.transfers - 1)
        self.transfers[rank] = None
        self.dirty_lanes |= {(running.lane, running.generation)}
        self.machines[rank] = self.machines[rank].with_transfer_ended(running.generation, "failed")

    def _error(self, rank: int) -> None:
        """Make a rank fail outside a commit: it stops voting and settles the current vote."""
        self.faults = self.faults._replace(errors=self.faults.errors - 1)
        if self.vote is not None and rank in self.vote.pending:
            if self.scenario.settles_errors:
                self._leave_votes(rank)
                return
            self._counted(rank)
        self.lost |= {rank}
        self._act(rank, self.machines[rank].lose_votes("an error"))

    def _launch(self) -> None:
        ballots = tuple(None if r in self.lost else m.ballot for r, m in enumerate(self.machines))
        truths = tuple(machine.installed.version_digest for machine in self.machines)
        all_ranks = frozenset(range(RANKS))
        settlements = tuple(self.scenario.settlement(all_ranks - {rank}) for rank in range(RANKS))
        self.vote = Vote(ballots, truths, all_ranks - self.lost, settlements)

    def _heard(self, rank: int) -> None:
        vote = self.vote
        outcome = self._outcome()
        if outcome.result is VoteResult.COMMIT and self._all_confirm():
            if self._settlement(rank, vote.settlements[rank].with_commit()) is Verdict.IN_DOUBT:
                self._settles(rank)
                return
        elif outcome.result is VoteResult.COMMIT:
            outcome = outcome.unconfirmed()
        self._act(rank, self.machines[rank].decide(outcome))
        if len(set(vote.truths)) > 1:
            must(rank in self.fatal, "kept serving although its peers use a different placement")
        self._counted(rank)

    def _impatient(self, rank: int) -> None:
        """Time out waiting for confirmations: the rank drops the commit unless a peer has committed."""
        self.faults = self.faults._replace(impatience=self.faults.impatience - 1)
        self._doubts(rank)

    def _broken(self, rank: int) -> None:
        """Make the rank fail to install the next layer."""
        self.faults = self.faults._replace(installs=self.faults.installs - 1)
        self.broken |= {rank}

    def _outcome(self) -> VoteOutcome:
        if None in self.vote.ballots:
            return VoteOutcome.without_plans()
        reduced = [min(column) for column in zip(*(b.encode() for b in self.vote.ballots), strict=True)]
        return VoteOutcome.decode(reduced)

    @property
    def _commits(self) -> bool:
        return self._outcome().result is VoteResult.COMMIT

    def _unheard(self, rank: int) -> None:
        if None not in self.vote.ballots:
            self.faults = self.faults._replace(losses=self.faults.losses - 1)
        self._leave_votes(rank)

    def _leave_votes(self, rank: int) -> None:
        cast = self.vote.ballots[rank]
        self.lost |= {rank}
        if cast.commits:
            self._doubts(rank)
        else:
            self._act(rank, self.machines[rank].lose_votes("votes lost"))
            self._counted(rank)

    def _doubts(self, rank: int) -> None:
        verdict = self._settlement(rank, self.vote.settlements[rank].with_doubt())
        if verdict is Verdict.IN_DOUBT:
            self._settles(rank)
        else:
            self._settled(rank, verdict)

    def _ask(self, rank: int, peer: int) -> None:
        """Make a rank in doubt ask a peer and process the answer immediately."""
        verdict = self._settlement(peer, self.vote.settlements[peer].with_doubt())
        settled = self._settlement(rank, self.vote.settlements[rank].with_answer(peer, verdict))
        if settled is not Verdict.IN_DOUBT:
            self._settled(rank, settled)

    def _refused(self, rank: int, peer: int) -> None:
        """Reject a datagram to a live peer. This has no effect, because the link to the peer is open."""
        self.faults = self.faults._replace(refusals=self.faults.refusals - 1)
        if self.scenario.refusal_is_death:
            self._counts_as_gone(rank, peer)

    def _presume(self, rank: int, peer: int) -> None:
        """Make a rank in doubt mistake a live peer for a dead one, because the network has cut every path to it."""
        self.faults = self.faults._replace(presumptions=self.faults.presumptions - 1)
        self._counts_as_gone(rank, peer)

    def _counts_as_gone(self, rank: int, peer: int) -> None:
        settled = self._settlement(rank, self.vote.settlements[rank].with_answer(peer, Verdict.IN_DOUBT))
        if settled is not Verdict.IN_DOUBT:
            self._settled(rank, settled)

    def _settlement(self, rank: int, settlement: Settlement) -> Verdict | None:
        before = self.vote.settlements
        self.vote = self.vote._replace(settlements=(*before[:rank], settlement, *before[rank + 1 :]))
        return settlement.verdict

    def _settles(self, rank: int) -> None:
        self.vote = self.vote._replace(settling=self.vote.settling | {rank})

    def _settled(self, rank: int, verdict: Verdict) -> None:
        cast = self.vote.ballots[rank]
        outcome = VoteOutcome.unanimous(cast.plan)
        if verdict is not Verdict.COMMITTED:
            outcome = outcome.with_abort()
        self._act(rank, self.machines[rank].decide(outcome))
        if rank in self.lost:
            self._act(rank, self.machines[rank].lose_votes("votes lost"))
        self._counted(rank)

    def _reform(self) -> None:
        """Re-form the votes after all ranks have lost them; stop all ranks if their layouts differ."""
        served = {machine.installed.version_digest for machine in self.machines}
        if len(served) > 1:
            self.fatal = frozenset(range(RANKS))
            return
        generation = max(machine.generation for machine in self.machines)
        lane = max(machine.lane for machine in self.machines)
        self.machines = [machine.reformed(generation, lane) for machine in self.machines]
        self.lost = frozenset()

    def _skip(self, rank: int) -> None:
        """Skip one of the host's calls, so that the rank counts the vote one forward pass later."""
        self.faults = self.faults._replace(skips=self.faults.skips - 1)
        self.forwards = _incremented(self.forwards, rank)

    def _drift(self, rank: int) -> None:
        """Let the rank's host queue one more forward pass ahead of its device."""
        self.faults = self.faults._replace(drifts=self.faults.drifts - 1)
        self.ahead = _incremented(self.ahead, rank)

    def _all_confirm(self) -> bool:
        confirmed = self.vote.confirmed
        if confirmed is None:
            host_counts = [sum(counts) for counts in zip(self.forwards, self.ahead, strict=True)]
            compared = {"its device's count": self.forwards, "its host's count": host_counts}
            confirmed = len(set(compared.get(self.scenario.confirms, ()))) <= 1
            self.vote = self.vote._replace(confirmed=confirmed)
        return confirmed

    def _counted(self, rank: int) -> None:
        self.vote = self.vote._replace(
            pending=self.vote.pending - {rank}, settling=self.vote.settling - {rank}
        )
        if not self.vote.pending:
            if self.scenario.waits_for_installs and self.lost and len(self.vote.installed) < RANKS:
                # Ranks that have installed the part stop, because a peer has not confirmed its install.
                self.fatal |= self.vote.installed
            voting = frozenset(range(RANKS)) - self.lost - self.fatal
            positions = {self.collectives[peer] for peer in voting}
            must(len(positions) <= 1, "ranks are in different collectives on the same link")
            self.vote = None
            self.forwards = (0,) * RANKS
            self.ahead = self.collectives = (0,) * RANKS
            if self.fatal and self.scenario.reports_failures:
                self.fatal = frozenset(range(RANKS))

    # Actions of the state machines

    def _act(self, rank: int, transition: Transition) -> None:
        self.machines[rank], actions = transition
        for action in actions:
            if rank in self.fatal:
                return
            if isinstance(action, StartTransfer):
                self._start(rank, action)
            elif isinstance(action, Commit):
                self._commit(rank, action)
            elif isinstance(action, PlanStatus) and action.state.drops_layers:
                # Like the driver, keep the staged experts if the status is for a different plan.
                self.staged[rank] = self.staged[rank] if self.machines[rank].plan is not None else None
            elif isinstance(action, Halted):
                self.fatal |= {rank}

    def _start(self, rank: int, action: StartTransfer) -> None:
        indices = tuple(layer.layer for layer in action.layers)
        tags = tuple(layer.phy2log_RS for layer in action.layers)
        started = Running(action.generation, action.lane, indices, tags)
        check_start(self, rank, action, started)
        self.transfers[rank] = started

    def _commit(self, rank: int, action: Commit) -> None:
        check_commit(self, rank, action)
        if rank in self.broken:
            self.fatal |= {rank}
            return
        if self.scenario.confirms_settled or rank not in self.vote.settling:
            # After an install, the ranks confirm it in a collective.
            self.collectives = _incremented(self.collectives, rank)
        self.vote = self.vote._replace(installed=self.vote.installed | {rank})
        staged = self.staged[rank]
        weights = list(self.weights[rank])
        for layer in action.layers:
            weights[layer.layer] = staged.tags[staged.layers.index(layer.layer)]
        self.weights[rank] = tuple(weights)
        self.staged[rank] = None

    def _can_complete(self, rank: int) -> bool:
        """Return True if all ranks have started the transfer; otherwise it can only time out."""
        generation = self.transfers[rank].generation
        return all(machine.generation >= generation for machine in self.machines)


def _incremented(counts: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (*counts[:rank], counts[rank] + 1, *counts[rank + 1 :])
