"""The agent inside an inference rank: counts heat, votes, switches layers, and stays out of the model's way.

A host makes three calls: ``Agent.start`` once its MoE layers are loaded, ``step`` after every forward pass, on every
rank, also where it had no tokens, and ``close``. Before it sleeps it calls ``drain``, before it loads other weights
``restore``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from eplb_service.placement import Placement
from eplb_service.wire.heat import StepPhase
from eplb_service.wire.status import Heartbeat
from worker_agent.adapters.live_layer import LiveLayer
from worker_agent.call_costs import CallCosts
from worker_agent.forward_clock import ForwardClock
from worker_agent.heat import HeatRecorder, ring_rows
from worker_agent.heat_reports import HeatReports
from worker_agent.history.record import History
from worker_agent.outbox import Outbox
from worker_agent.rendezvous import Rendezvous, meet
from worker_agent.settings import AgentSettings
from worker_agent.status_reporter import StatusReporter
from worker_agent.step_timer import StepTimer
from worker_agent.stream import ServiceStream
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.driver import SwitchDriver
from worker_agent.swap.installed import Installed
from worker_agent.swap.listener import SwitchStats

_log = logging.getLogger("eplb.agent")


class RestoreError(RuntimeError):
    """Experts could not be brought to where a host wanted them; the model may serve on with what is installed."""


class Agent:
    """One rank's agent; made by ``start``."""

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: AgentSettings,
        rendezvous: Rendezvous,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        self.identity = rendezvous.identity
        self._clock = ForwardClock(list(layers))
        self._step = 0
        self._calls = 0
        self._fatal: FatalSwitchError | None = None
        self._heat = HeatRecorder(layers, min(settings.report_steps, ring_rows(layers)))
        self._timer, self._costs = StepTimer(), CallCosts()
        self._outbox = Outbox(settings.queue_reports)
        self._history = History(settings.history, rendezvous.identity, rendezvous.installed)
        self._reports = HeatReports(self._heat, self._outbox, self._history, settings.heat_deadline_steps)
        listener = StatusReporter(self._outbox, self._heat, lambda: (self._step, self.installed))
        self._switch = SwitchDriver(
            layers, settings, rendezvous, self._clock, listener, self._history, on_commit
        )
        self._stream = ServiceStream(
            settings,
            rendezvous.identity,
            self._outbox,
            lambda: self.installed,
            lambda: self._switch.state.highest_term,
            self._beat,
        )

    @classmethod
    def start(
        cls,
        layers: Sequence[LiveLayer],
        host_group: dist.ProcessGroup,
        settings: AgentSettings | None = None,
        *,
        token_group: int | None = None,
        on_commit: Callable[[int], None] | None = None,
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
        on_commit
            Called with the index of a layer whose weights and tables have just been written, between two forward
            passes, so that the host can refresh what it derives from them. Where it fails, so does ``step``, with
            ``FatalSwitchError``.

        Returns
        -------
        Agent
            Connected or not: the service may come later.

        Raises
        ------
        RendezvousError
            On all ranks alike, where they do not fit together.
        """
        settings = settings or AgentSettings()
        return cls(layers, settings, meet(layers, host_group, settings, token_group), on_commit)

    @property
    def installed(self) -> Installed:
        """What this rank serves; an immutable snapshot."""
        return self._switch.state.installed

    @property
    def stats(self) -> SwitchStats:
        """What this rank has switched since its start."""
        return self._switch.stats

    @property
    def halted(self) -> str | None:
        """Why this rank no longer takes part in balancing, or ``None``."""
        return self._switch.state.halted

    @property
    def unheard(self) -> str | None:
        """Why the ranks do not vote at present, or ``None``; they form their votes again by themselves."""
        unheard = self._switch.state.unheard
        return None if unheard is None else "; ".join(filter(None, (unheard, self._switch.votes.complaint)))

    @property
    def connected(self) -> bool:
        """Whether the service is there."""
        return self._stream.connected

    def step(
        self, phase: StepPhase = StepPhase.DECODE, tokens: int | None = None, number: int | None = None
    ) -> None:
        """A forward pass has been queued. Called between two, on every rank, by the thread that runs the model.

        On a device it must be called on the stream that the passes are queued on, and reads and writes the layers on
        that stream alone: heat is read after the pass that has counted it, a commit lies between two passes. It never
        waits for the device, unless passes are counted by ``load_counter`` and a layer is to be committed. The time
        from one call to the next, by the host's clock, is reported as the step's.

        Never waits on the network but for the slowest rank's ballot, which the model's own collectives have nearly
        always brought in. Whatever else goes wrong here stops balancing, not the model. A call that is missed, or made
        twice, costs heat and at worst a wait, never a wrong output: layers switch by forward passes.

        Parameters
        ----------
        phase
            Of the pass: prefill, decode or dummy.
        tokens
            How many of its own this rank had in it, for those who record heat; ``None`` where not known.
        number
            The host's own number of the pass, growing and equal on all ranks, where it has one. Without it passes are
            counted by the layers' ``load_counter``, for which a commit waits for the device.

        Raises
        ------
        FatalSwitchError
            Where this rank cannot know which weights its peers route to, in this call and in every later one; it must
            not serve another token.
        """
        if self._fatal is not None:
            raise self._fatal
        with self._costs.call():
            self._boundary(phase, tokens, number)

    def drain(self, reason: str = "the host asked for it") -> None:
        """Complete or abort the switch under way, and take no plans until ``resume``.

        A collective: called by every rank between the same two forward passes, before the model sleeps or loads other
        weights. When it returns nothing reads or writes the layers' weights any more; it takes at most a transfer's
        deadline. The host may then change weights in place, not their placement.

        Parameters
        ----------
        reason
            What the service reports as the cause of the abort.

        Raises
        ------
        FatalSwitchError
            As ``step`` does.
        """
        self._timer.pause()
        self._guarded(self._switch.drain, reason)
        self._guarded(self._reports.publish, self._calls)

    def restore(self, placement: Placement, reason: str = "the host loads weights") -> None:
        """Drain, then bring every expert to its slot of ``placement``; take no plans until ``resume``.

        For hosts that load weights into a running model by a layout of their own: they restore the one that they
        started with, load, and resume. A collective like ``drain``; takes as long as the transfers of all layers that
        have changed since.

        Parameters
        ----------
        placement
            Of all ranks, usually what ``installed.placement`` was at the start.
        reason
            What the service reports as the cause of the abort.

        Raises
        ------
        RestoreError
            On all ranks alike, where the ranks could not do it. Each layer serves what it did before, or what
            ``placement`` names.
        FatalSwitchError
            As ``step`` does.
        """
        self._timer.pause()
        self._guarded(self._switch.restore, placement, reason)
        self._guarded(self._reports.publish, self._calls)
        served = self.installed.placement
        apart = np.flatnonzero((served.phy2log_LRS != placement.phy2log_LRS).any(axis=(1, 2)))
        if apart.size:
            raise RestoreError(
                f"the experts of {apart.size} layers could not be brought back: "
                f"{self.halted or self.unheard or 'the ranks dropped the plan'}"
            )

    def resume(self) -> None:
        """Take plans again after ``drain`` or ``restore``."""
        self._switch.resume()

    def close(self, timeout: float = 5.0) -> None:
        """End votes and threads; what is installed stays as it is, and the model may serve on with it.

        Each rank may call it at a time of its own: the others then stop balancing.

        Parameters
        ----------
        timeout
            Seconds after which the stream to the service is given up.

        Raises
        ------
        FatalSwitchError
            As ``step`` does.
        """
        self._stream.close(timeout)
        try:
            self._switch.close()
        finally:
            self._history.close(self._step)

    # What happens at a step boundary, in order

    def _boundary(self, phase: StepPhase, tokens: int | None, number: int | None) -> None:
        self._calls += 1
        self._switch.budget.refill()
        before, self._step = self._step, self._clock.called(number)
        new_pass = self._step > before
        if new_pass:
            self._guarded(self._record, phase, tokens, self._timer.lap(self._step - before))
        self._guarded(self._take_events)
        if new_pass:
            with self._costs.vote():
                self._guarded(self._switch.vote, self._step)
        self._guarded(self._reports.publish, self._calls)

    def _record(self, phase: StepPhase, tokens: int | None, micros: int) -> None:
        welcome = self._stream.welcome
        if welcome is not None:
            self._reports.follow(welcome.report_steps, self._stream.reporting)
            self._switch.see_term(welcome.leader_term)
        self._heat.step_done(self._step - 1, phase, self.installed.layer_epochs, tokens, micros)

    def _take_events(self) -> None:
        self._stream.keep_alive()
        heard = []
        while not self._stream.plans.empty():
            heard.append(self._stream.plans.get_nowait())
        self._switch.take_events(self._step, heard)

    def _beat(self) -> Heartbeat:
        installed = self.installed
        return Heartbeat(
            step=self._step,
            epoch=installed.epoch,
            digest=installed.digest,
            error=self.halted
            or self.unheard
            or self._switch.votes.complaint
            or self._clock.complaint
            or self._reports.complaint
            or "",
            calls=self._costs.calls,
            call_micros=self._costs.nanoseconds // 1000,
            vote_micros=self._costs.vote_nanoseconds // 1000,
            staging_bytes=self._switch.transfers.staging.nbytes,
            ring_bytes=self._heat.ring_bytes,
        )

    def _guarded(self, part: Callable[..., None], *arguments: Any) -> None:
        try:
            part(*arguments)
        except FatalSwitchError as fatal:
            self._fatal = fatal
            self._switch.fail(str(fatal))
            raise
        except Exception as error:
            if self.halted is None:
                _log.exception("rank %d: the agent failed; the model goes on", self.identity.rank)
            self._switch.halt(f"{type(error).__name__}: {error}")
