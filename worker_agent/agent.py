"""The agent inside an inference rank: counts heat, votes, switches layers, and stays out of the model's way.

A host makes three calls: ``Agent.start`` once its MoE layers are loaded, ``step`` after every forward pass, on every
rank, even if it had no tokens, and ``close``. It calls ``drain`` before it sleeps, and ``restore`` before it loads
other weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias

import numpy as np
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Placement
from eplb_core.wire.agent import Heartbeat, Reporting
from worker_agent.forward_clock import ForwardClock, StepTimer, Stopwatch
from worker_agent.heat import HeatRecorder
from worker_agent.live_layer import LiveLayer
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings
from worker_agent.stream import Outbox, ServiceStream
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.driver import SwitchDriver, SwitchStats
from worker_agent.swap.rank_layout import RankLayout
from worker_agent.swap.record import History
from worker_agent.swap.rendezvous import Rendezvous, meet

_log = logging.getLogger("eplb.agent")

_INITIAL_REPORT_STEPS = 16
"""Steps per heat report until the service says otherwise."""
_WATCH_CALLS = 16
"""Calls from one look at the control stream's thread to the next."""


class RestoreError(RuntimeError):
    """The agent could not move experts to the placement that a host requested; the installed one stays usable."""


_Arguments = ParamSpec("_Arguments")
_HostCall: TypeAlias = "Callable[Concatenate[Agent, _Arguments], None]"


def _contained(
    failure: type[RestoreError] | None = None,
) -> Callable[[_HostCall[_Arguments]], _HostCall[_Arguments]]:
    """Keep each error that arises in a host's call from the model, unless it is a ``FatalSwitchError``.

    A host that must know that the call has failed gets a ``failure``.
    """

    def contain(method: _HostCall[_Arguments]) -> _HostCall[_Arguments]:
        def call(self: Agent, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
            try:
                try:
                    method(self, *args, **kwargs)
                except (FatalSwitchError, RestoreError):
                    raise
                except Exception as error:
                    self._recover(error)
                    if failure is not None:
                        raise failure(f"{type(error).__name__}: {error}") from error
            except (FatalSwitchError, RestoreError):
                raise
            except Exception as error:
                # Recovery has failed as well; the next call makes up for it.
                if self._fatal is not None:
                    raise self._fatal from None
                if failure is not None:
                    raise failure(f"{type(error).__name__}: {error}") from error

        functools.update_wrapper(call, method)
        return call

    return contain


class Agent:
    """One rank's agent; made by ``start``."""

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        settings: AgentSettings,
        rendezvous: Rendezvous,
        on_commit: Callable[[int], None] | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        self.identity = rendezvous.identity
        self._clock = ForwardClock(list(layers), runtime)
        self._step = 0
        self._fatal: FatalSwitchError | None = None
        self._unfinished = False
        self._heat = HeatRecorder(layers, _INITIAL_REPORT_STEPS)
        self._timer, self._in_calls, self._in_votes = StepTimer(), Stopwatch(), Stopwatch()
        self._outbox = Outbox(runtime=runtime)
        self._history = History(settings.history, rendezvous.identity, rendezvous.installed)
        self._switch = SwitchDriver(
            layers,
            settings,
            rendezvous,
            self._clock,
            self._history,
            self._outbox.put,
            self._heat.cut,
            on_commit,
            runtime,
        )
        self._stream = ServiceStream(
            settings,
            rendezvous.identity,
            self._outbox,
            lambda: self.installed,
            lambda: self._switch.state.highest_term,
            self._beat,
            runtime,
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
            Settings of the agent; by default read from the environment.
        token_group
            A number equal on all ranks that see the same tokens (all-gather dispatch); ``None`` where each has its own.
        on_commit
            Called with the index of a layer whose weights and tables have just been written, between two forward
            passes, so that the host can refresh what it derives from them. If it fails, ``step`` raises
            ``FatalSwitchError``.

        Returns
        -------
        Agent
            Connected or not: the service may come later.

        Raises
        ------
        RendezvousError
            On all ranks, if they do not fit together.
        """
        settings = settings or AgentSettings()
        return cls(layers, settings, meet(layers, host_group, settings, token_group), on_commit)

    @property
    def installed(self) -> RankLayout:
        """Snapshot of what this rank serves; immutable."""
        return self._switch.state.installed

    @property
    def stats(self) -> SwitchStats:
        """Switches of this rank since its start."""
        return self._switch.stats

    @property
    def halted(self) -> str | None:
        """Reason why this rank must never serve again, or ``None``."""
        return None if self._fatal is None else str(self._fatal)

    @property
    def unheard(self) -> str | None:
        """Reason why the ranks do not vote at present, or ``None``. They resume voting without intervention."""
        unheard = self._switch.state.unheard
        return None if unheard is None else "; ".join(filter(None, (unheard, self._switch.votes.complaint)))

    @property
    def connected(self) -> bool:
        """True while the service is there."""
        return self._stream.connected

    @_contained()
    def step(self, phase: StepPhase = StepPhase.DECODE, tokens: int | None = None) -> None:
        """Record that a forward pass has been queued. The model's thread calls it between two passes, on every rank.

        On a device, call it on the stream that the passes are queued on. The agent reads and writes the layers only on
        that stream: it reads heat after the pass that counted it, and commits between two passes. It waits for the
        device only to commit a layer, because it must know which queued pass the commit follows. The time from one call
        to the next, by the host's clock, is reported as the step's time.

        It waits on the network only for the slowest rank's ballot, which nearly always arrives before the model's own
        collectives are done. Any other failure here stops balancing, not the model. A missed or repeated call costs
        heat, and at worst a wait. It never causes a wrong output, because layers switch at numbered forward passes.

        Parameters
        ----------
        phase
            Phase of the pass: prefill, decode, mixed or dummy.
        tokens
            Number of this rank's own tokens in the pass, without padding; ``None`` if unknown. If ranks share
            tokens, the first reports them and the others report 0.

        Raises
        ------
        FatalSwitchError
            If this rank cannot know which weights its peers route to. It must not serve another token, and every later
            call raises the error again.
        """
        if self._fatal is not None:
            raise self._fatal
        with self._in_calls:
            self._boundary(phase, tokens)

    @_contained()
    def drain(self, reason: str = "the host asked for it") -> None:
        """Complete or abort the switch under way, and take no plans until ``resume``.

        A collective: called by every rank between the same two forward passes, before the model sleeps or loads other
        weights. When it returns nothing reads or writes the layers' weights any more; it takes at most a transfer's
        deadline. The host may then change weights in place, not their placement.

        Parameters
        ----------
        reason
            Cause of the abort, which the service reports.

        Raises
        ------
        FatalSwitchError
            As ``step`` does.
        """
        # The host is about to change weights, so no plan may start even if a later call fails.
        self._guarded(self._switch.pause, reason)
        self._timer.pause()
        self._guarded(self._switch.drain, reason)
        # The host may discard the memory that heat is counted in.
        self._guarded(self._heat.cut, self.installed.layer_epochs)
        self._guarded(self._publish_heat)

    @_contained(RestoreError)
    def restore(self, placement: Placement, reason: str = "the host loads weights") -> None:
        """Drain, then bring every expert to its slot of ``placement``; take no plans until ``resume``.

        Hosts that load weights into a running model in their own layout restore the placement that they started with,
        load, and resume. A collective like ``drain``. It takes as long as the transfers of all layers that differ from
        ``placement``.

        Parameters
        ----------
        placement
            Of all ranks, usually what ``installed.placement`` was at the start.
        reason
            Cause of the abort, which the service reports.

        Raises
        ------
        RestoreError
            On all ranks, if a layer could not be restored. Each layer then serves either its previous placement or
            ``placement``.
        FatalSwitchError
            As ``step`` does.
        """
        self._guarded(self._switch.pause, reason)
        self._timer.pause()
        self._guarded(self._switch.restore, placement, reason)
        self._guarded(self._switch.pause, reason)
        self._guarded(self._publish_heat)
        served = self.installed.placement
        apart = np.flatnonzero((served.phy2log_LRS != placement.phy2log_LRS).any(axis=(1, 2)))
        if apart.size:
            raise RestoreError(
                f"the experts of {apart.size} layers could not be brought back: "
                f"{self.halted or self.unheard or 'the ranks dropped the plan'}"
            )

    @_contained()
    def resume(self) -> None:
        """Take plans again after ``drain`` or ``restore``."""
        self._switch.resume()

    @_contained()
    def close(self, timeout: float = 5.0) -> None:
        """Stop voting and all threads. The installed placement stays, and the model can keep serving with it.

        Ranks may call it at different times. After the first call the other ranks stop balancing.

        Parameters
        ----------
        timeout
            Seconds to wait for the stream to the service to end.

        Raises
        ------
        FatalSwitchError
            As ``step`` does.
        """
        try:
            self._guarded(self._stream.close, timeout)
            self._switch.close()
        finally:
            self._history.close(self._step)

    # What happens at a step boundary, in order

    def _boundary(self, phase: StepPhase, tokens: int | None) -> None:
        if self._unfinished:
            self._guarded(self._switch.stumble, "an error ended the previous call")
        self._unfinished = True
        before = self._step
        self._guarded(self._count_call)
        if self._step > before:
            self._guarded(self._record, phase, tokens, self._step - before)
        self._guarded(self._take_events)
        if self._step > before:
            with self._in_votes:
                self._guarded(self._switch.vote, self._step)
        self._guarded(self._publish_heat)
        self._unfinished = False

    def _count_call(self) -> None:
        self._step = max(self._step, self._clock.called())
        self._switch.budget.refill()

    def _record(self, phase: StepPhase, tokens: int | None, passes: int) -> None:
        micros = self._timer.lap(passes)
        welcome = self._stream.welcome
        if welcome is not None:
            self._adopt(welcome.report_steps, self._stream.reporting)
            self._switch.see_term(welcome.leader_term)
        epochs, base = self.installed.layer_epochs, self._clock.base
        self._heat.step_done(self._step - 1, phase, epochs, tokens, micros, base)

    def _adopt(self, report_steps: int, reporting: Reporting) -> None:
        """Report as the service asks; remove waiting heat that it no longer wants."""
        changed = reporting != self._heat.reporting
        self._heat.adopt(reporting.report_steps or report_steps, reporting)
        if changed:
            self._outbox.thin(lambda report: self._heat.wants(report.first_step))

    def _publish_heat(self) -> None:
        for report in self._heat.take():
            self._history.heat(report)
            self._outbox.put(report)
        self._outbox.lost_steps = self._heat.lost_steps

    def _take_events(self) -> None:
        if self._clock.calls % _WATCH_CALLS == 0:
            self._stream.keep_alive()
        orders = []
        while not self._stream.plans.empty():
            orders.append(self._stream.plans.get_nowait())
        self._switch.take_events(self._step, orders)

    def _beat(self) -> Heartbeat:
        installed = self.installed
        return Heartbeat(
            step=self._step,
            epoch=installed.epoch,
            digest=installed.digest,
            error=self.halted
            or self._clock.complaint
            or self.unheard
            or self._switch.complaint
            or self._heat.complaint
            or "",
            calls=self._clock.calls,
            call_micros=self._in_calls.micros,
            vote_micros=self._in_votes.micros,
            staging_bytes=self._switch.transfers.staging.nbytes,
            ring_bytes=self._heat.ring_bytes,
        )

    def _guarded(self, part: Callable[..., None], *arguments: Any) -> None:
        """Do a part of a call; an error in it ends the votes until all ranks form them again, never the model."""
        try:
            part(*arguments)
        except BaseException as error:
            self._recover(error)

    def _recover(self, error: BaseException) -> None:
        """Keep the votes consistent after a component fails; raise only fatal errors."""
        fatal = _fatal_behind(error)
        if fatal is not None:
            self._end(fatal)
            raise fatal
        if self.unheard is None:
            _log.error("rank %d: the agent failed; the model goes on", self.identity.rank, exc_info=error)
        try:
            self._switch.stumble(f"{type(error).__name__}: {error}")
        except FatalSwitchError as diverged:
            self._end(diverged)
            if isinstance(error, Exception):
                raise
        if not isinstance(error, Exception):
            raise error

    def _end(self, fatal: FatalSwitchError) -> None:
        self._fatal = fatal
        self._switch.fail(str(fatal))


def _fatal_behind(error: BaseException | None) -> FatalSwitchError | None:
    """Return the fatal error that ``error`` is, or that was being handled when it arose."""
    while error is not None and not isinstance(error, FatalSwitchError):
        error = error.__context__
    return error
