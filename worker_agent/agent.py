"""The agent inside an inference rank: counts heat, votes, switches layers, and stays out of the model's way.

A host makes three calls: ``Agent.start`` once its MoE layers are loaded, ``step`` after every forward pass, on every
rank, also where it had no tokens, and ``close``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from eplb_service.placement import expert_map
from eplb_service.wire.generated import agent_pb2
from worker_agent.adapters.live_layer import LiveLayer
from worker_agent.heat import HeatRecorder, StepPhase
from worker_agent.identity import Identity
from worker_agent.meeting import meet
from worker_agent.outbox import Outbox
from worker_agent.settings import AgentSettings
from worker_agent.stream import ServiceStream
from worker_agent.swap import machine as switch
from worker_agent.swap.arbiter import Arbiter, FatalSwitchError
from worker_agent.swap.ballot import Ballot, Decision, Outcome, Progress
from worker_agent.swap.budget import ByteBudget
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.installed import Installed
from worker_agent.swap.staging import install
from worker_agent.swap.transfer import TransferResult, TransferWorker
from worker_agent.swap.vote import VoteBox, VoteError

_log = logging.getLogger("eplb.agent")


@dataclass
class AgentStats:
    """What this rank has done since its start."""

    layers_switched: int = 0
    experts_received: int = 0
    bytes_received: int = 0
    plans_aborted: int = 0
    commit_seconds: float = 0.0
    transfer_seconds: float = 0.0


class Agent:
    """One rank's agent; made by ``start``."""

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: AgentSettings,
        group: AgentGroup,
        identity: Identity,
        installed: Installed,
    ) -> None:
        self.stats = AgentStats()
        self.identity = identity
        self._layers = layers
        self._settings = settings
        self._step = 0
        self._machine = switch.SwitchMachine(installed, settings.offer_deadline_steps)
        self._heat = HeatRecorder(layers, min(settings.report_steps, layers[0].moe_load.shape[0]))
        self._lost_steps_told = 0
        self._budget = ByteBudget(settings.bytes_per_step)
        vote_timeout = timedelta(seconds=settings.vote_timeout_seconds)
        self._votes: VoteBox | None = VoteBox(
            group.process_group("vote", vote_timeout), settings.vote_lag, vote_timeout
        )
        self._cast: Ballot | None = None
        self._arbiter = Arbiter(group.store)
        transfer_timeout = timedelta(seconds=settings.transfer_timeout_seconds)
        self._transfers = TransferWorker(group, transfer_timeout, self._budget, settings.chunk_bytes)
        self._staged: TransferResult | None = None
        self._outbox = Outbox(settings.queue_reports)
        self._stream = ServiceStream(
            settings, identity, self._outbox, lambda: self._machine.installed, self._beat
        )

    @classmethod
    def start(
        cls,
        layers: Sequence[LiveLayer],
        host_group: dist.ProcessGroup,
        settings: AgentSettings | None = None,
        *,
        token_group: int | None = None,
    ) -> Agent:
        """Meet the other ranks' agents and begin. A collective over ``host_group``.

        Parameters
        ----------
        layers
            This rank's live MoE layers, the same ones in the same order on every rank.
        host_group
            A CPU-capable (gloo) process group over the EP ranks, used only here.
        settings
            By default those of the environment.
        token_group
            A number equal on all ranks that see the same tokens (all-gather dispatch); ``None`` where each has its own.

        Raises ``MeetingError``, on all ranks alike, where they do not fit together.
        """
        settings = settings or AgentSettings()
        group, identity, installed = meet(layers, host_group, settings, token_group)
        return cls(layers, settings, group, identity, installed)

    @property
    def installed(self) -> Installed:
        """What this rank serves; an immutable snapshot."""
        return self._machine.installed

    @property
    def halted(self) -> str | None:
        """Why this rank no longer takes part in balancing, or ``None``."""
        return self._machine.halted

    @property
    def connected(self) -> bool:
        """Whether the service is there."""
        return self._stream.connected

    def step(self, phase: StepPhase = StepPhase.DECODE) -> None:
        """A forward pass has been queued. Called between two, on every rank, by the thread that runs the model.

        Never waits on the network but for the slowest rank's ballot, which the model's own collectives have nearly
        always brought in. Whatever goes wrong here stops balancing, not the model; the one error that is let through
        is ``FatalSwitchError``.
        """
        # The count of steps is what votes are launched by: nothing that fails may keep it from growing.
        self._step += 1
        self._budget.refill()
        self._guarded(self._record, phase)
        self._guarded(self._take_events)
        self._guarded(self._vote)
        self._guarded(self._publish)

    def close(self, timeout: float = 5.0) -> None:
        """End the threads; what is installed stays as it is."""
        self._stream.close(timeout)
        self._transfers.close()
        if self._votes is not None and self._votes.due(self._step + self._settings.vote_lag):
            # Let the last ballot out, so that no other rank is left waiting for it.
            try:
                self._votes.consume()
            except VoteError as error:
                _log.debug("rank %d: last vote: %s", self.identity.rank, error)

    # What happens at a step boundary, in order

    def _record(self, phase: StepPhase) -> None:
        welcome = self._stream.welcome
        if welcome is not None:
            self._heat.adopt(welcome.report_steps)
        self._heat.step_done(self._step - 1, phase, self._machine.installed.layer_epochs)

    def _take_events(self) -> None:
        while not self._stream.plans.empty():
            self._carry_out(self._machine.offer(self._stream.plans.get_nowait(), self._step))
        result = self._transfers.poll()
        if result is not None:
            self._transfer_ended(result)
        self._carry_out(self._machine.tick(self._step))

    def _vote(self) -> None:
        if self._votes is None:
            return
        if self._votes.due(self._step):
            self._count_votes(self._votes)
        if self._votes is not None and self._step % self._settings.vote_interval == 0:
            self._cast = self._machine.ballot()
            try:
                self._votes.launch(self._cast, self._step)
            except VoteError as error:
                self._lose_votes(error)

    def _publish(self) -> None:
        for segment in self._heat.take():
            self._outbox.put(segment)
        if self._heat.lost_steps > self._lost_steps_told:
            self._outbox.count_lost(self._heat.lost_steps - self._lost_steps_told)
            self._lost_steps_told = self._heat.lost_steps

    # Votes

    def _count_votes(self, votes: VoteBox) -> None:
        try:
            outcome = votes.consume()
        except VoteError as error:
            self._lose_votes(error)
            return
        if outcome.decision is Decision.COMMIT and not self._arbiter.may_commit(votes.number, heard=True):
            # A rank that did not hear this vote was first to record that it does not count.
            outcome = _with_abort(outcome)
        self._carry_out(self._machine.decide(outcome))

    def _lose_votes(self, error: VoteError) -> None:
        """The ranks can no longer be heard: settle what the last vote may have decided, then stop balancing."""
        votes, self._votes = self._votes, None
        cast = self._cast
        if votes is not None and cast is not None and cast.progress == Progress.READY and not cast.abort:
            unanimous = Outcome(Progress.READY, cast.plan, cast.plan, installed_agree=True, abort=False)
            committed = self._arbiter.may_commit(votes.number, heard=False)
            self._carry_out(self._machine.decide(unanimous if committed else _with_abort(unanimous)))
        self._carry_out(self._machine.halt(str(error)))

    # What the machine asks for

    def _carry_out(self, actions: Sequence[switch.Action]) -> None:
        for action in actions:
            match action:
                case switch.StartTransfer():
                    self._transfers.start(action, self._layers[action.layer.layer])
                case switch.Commit():
                    self._commit(action)
                case switch.DropStaging():
                    self._transfers.drop_staging()
                    self._staged = None
                case switch.Accepted():
                    self._tell(action.plan_id, action.layer, agent_pb2.PLAN_STATE_ACCEPTED)
                case switch.Refused():
                    self._tell(action.plan_id, 0, agent_pb2.PLAN_STATE_REFUSED, reason=action.reason)
                case switch.Aborted():
                    self.stats.plans_aborted += 1
                    self._tell(
                        action.plan_id, action.layer, agent_pb2.PLAN_STATE_ABORTED, reason=action.reason
                    )
                case switch.Halted():
                    _log.error("rank %d: balancing has stopped: %s", self.identity.rank, action.reason)

    def _transfer_ended(self, result: TransferResult) -> None:
        self._carry_out(self._machine.transfer_ended(result.generation, result.error))
        if result.error is not None:
            _log.warning("rank %d: %s", self.identity.rank, result.error)
        elif result.generation == self._machine.generation and self._machine.progress == Progress.READY:
            self._staged = result
            plan = self._machine.plan_under_way
            assert plan is not None
            self._tell(
                *plan,
                agent_pb2.PLAN_STATE_TRANSFERRED,
                bytes_received=result.bytes_received,
                transfer_seconds=result.seconds,
            )

    def _commit(self, commit: switch.Commit) -> None:
        """Switch one layer, in place, between two steps."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise FatalSwitchError(
                f"layer {commit.layer.layer} was voted in, but nothing is staged on this rank"
            )
        self._heat.cut(commit.before.layer_epochs)
        began = time.perf_counter()
        rank, experts = self.identity.rank, self.identity.experts
        local_E = torch.from_numpy(expert_map(commit.layer.phy2log_RS[rank], experts))
        log2phy_E = torch.from_numpy(commit.layer.log2phy_E)
        try:
            written = install(
                self._layers[commit.layer.layer], staged.staged, staged.slots, local_E, log2phy_E
            )
        except Exception as error:
            raise FatalSwitchError(f"layer {commit.layer.layer} could not be installed: {error}") from error
        seconds = time.perf_counter() - began
        self.stats.layers_switched += 1
        self.stats.experts_received += len(staged.slots)
        self.stats.bytes_received += written
        self.stats.commit_seconds += seconds
        self.stats.transfer_seconds += staged.seconds
        self._tell(
            commit.plan_id,
            commit.layer.layer,
            agent_pb2.PLAN_STATE_COMMITTED,
            installed=commit.after,
            bytes_received=written,
            transfer_seconds=staged.seconds,
            commit_seconds=seconds,
        )

    # Telling

    def _tell(
        self,
        plan_id: int,
        layer: int,
        state: agent_pb2.PlanState,
        *,
        installed: Installed | None = None,
        **facts: Any,
    ) -> None:
        installed = installed or self._machine.installed
        self._outbox.put(
            agent_pb2.PlanStatus(
                plan_id=plan_id,
                layer=layer,
                state=state,
                epoch=installed.epoch,
                digest=installed.digest,
                step=self._step,
                **facts,
            )
        )

    def _beat(self) -> agent_pb2.Heartbeat:
        installed = self._machine.installed
        return agent_pb2.Heartbeat(
            step=self._step,
            epoch=installed.epoch,
            digest=installed.digest,
            error=self._machine.halted or "",
        )

    def _guarded(self, part: Callable[..., None], *arguments: Any) -> None:
        try:
            part(*arguments)
        except FatalSwitchError:
            raise
        except Exception as error:
            if self._machine.halted is None:
                _log.exception("rank %d: the agent failed; the model goes on", self.identity.rank)
            self._machine.halt(f"{type(error).__name__}: {error}")


def _with_abort(outcome: Outcome) -> Outcome:
    return Outcome(outcome.slowest, outcome.plan_low, outcome.plan_high, outcome.installed_agree, abort=True)
