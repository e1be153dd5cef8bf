"""The agent in an inference rank. It reports heat, votes with its peers, and switches layers.

An engine host makes three calls: ``Agent.start`` once its MoE layers are loaded, ``step`` after every forward pass, and
``close`` at the end. Every rank calls ``step``, even for a pass without tokens. Before the model sleeps, the host calls
``drain``. Before it loads other weights, it calls ``restore``.
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
from worker_agent.swap.driver import SwitchCallbacks, SwitchDriver, SwitchStats
from worker_agent.swap.rank_layout import RankLayout
from worker_agent.swap.record import History
from worker_agent.swap.rendezvous import Rendezvous, meet

_log = logging.getLogger("eplb.agent")

_INITIAL_REPORT_STEPS = 16
"""Number of steps per heat report until the service requests a different number."""
_WATCH_CALLS = 16
"""Number of ``step`` calls between checks that the control stream's thread is alive."""


class RestoreError(RuntimeError):
    """The agent could not restore the placement that the host requested.

    The current layout remains usable.
    """


_Arguments = ParamSpec("_Arguments")
_HostCall: TypeAlias = "Callable[Concatenate[Agent, _Arguments], None]"


def _contained(
    failure: type[RestoreError] | None = None,
) -> Callable[[_HostCall[_Arguments]], _HostCall[_Arguments]]:
    """Return a decorator that keeps errors in a host-facing method from reaching the model.

    ``FatalSwitchError`` and ``RestoreError`` are still raised.

    Parameters
    ----------
    failure
        Exception type to raise instead of a contained error; ``None`` to return normally.
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
                # Recovery failed as well. The next call finds the work unfinished and tries to recover again.
                if self._fatal is not None:
                    raise self._fatal from None
                if failure is not None:
                    raise failure(f"{type(error).__name__}: {error}") from error

        functools.update_wrapper(call, method)
        return call

    return contain


class Agent:
    """Agent of one rank. Create it with ``start``.

    Parameters
    ----------
    layers
        This rank's live MoE layers.
    settings
        The agent's settings.
    rendezvous
        Result of the rendezvous with the peers.
    on_commit
        See ``start``.
    runtime
        Clock and threads to use.

    Attributes
    ----------
    identity
        This rank's identity within the deployment.
    """

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
        self._log_interval = settings.log_interval_steps
        self._fatal: FatalSwitchError | None = None
        self._unfinished = False
        self._heat = HeatRecorder(layers, _INITIAL_REPORT_STEPS)
        self._timer = StepTimer()
        self._in_calls = Stopwatch()
        self._in_votes = Stopwatch()
        self._outbox = Outbox(runtime=runtime)
        self._history = History(settings.history, rendezvous.identity, rendezvous.installed)
        callbacks = SwitchCallbacks(self._outbox.put, self._heat.cut, on_commit)
        self._switch = SwitchDriver(
            layers, settings, rendezvous, self._clock, self._history, callbacks, runtime
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
        """Join the other ranks' agents and start balancing. This is a collective over ``host_group``.

        Parameters
        ----------
        layers
            This rank's live MoE layers. All ranks pass the same layers in the same order.
        host_group
            CPU-capable (gloo) process group of the EP ranks. It is used only during this call.
        settings
            The agent's settings; read from the environment by default.
        token_group
            ID of this rank's token group. Ranks that see the same tokens (all-gather dispatch) have the same ID.
            ``None`` if each rank has its own tokens.
        on_commit
            Called between two forward passes with the index of a layer whose weights and tables have just been written,
            so that the host can refresh values derived from them. If the call fails, ``step`` raises
            ``FatalSwitchError``.

        Returns
        -------
        Agent
            The running agent. It connects to the service in the background, so the service may be started later.

        Raises
        ------
        RendezvousError
            If the ranks are incompatible. Every rank raises it.

        Examples
        --------
        The example has one rank and one layer of four experts. A namespace stands in for the layer. Each pass writes
        one row of the heat ring and increments the counter. The service is unreachable, so the model keeps its initial
        layout:

        >>> from types import SimpleNamespace
        >>> import torch
        >>> weights_SHH = torch.randn(4, 8, 8)
        >>> layer = SimpleNamespace(
        ...     expert_map=torch.arange(4, dtype=torch.int32),
        ...     log2phy=torch.arange(4, dtype=torch.int32),
        ...     moe_load=torch.zeros(16, 4, dtype=torch.int32),
        ...     source_load=None,
        ...     load_counter=torch.zeros((), dtype=torch.int64),
        ...     shares_tokens=False,
        ...     expert_weights=lambda: [weights_SHH],
        ... )
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> settings = AgentSettings(service="eplb.example:50551", data_host="127.0.0.1")
        >>> agent = Agent.start([layer], dist.group.WORLD, settings)
        >>> for step in range(3):
        ...     layer.moe_load[step % 16] = torch.tensor([5, 3, 2, 0])
        ...     layer.load_counter += 1
        ...     agent.step(StepPhase.DECODE, tokens=10)
        >>> agent.installed.epoch, agent.connected, agent.halted
        (0, False, None)
        >>> agent.close()
        >>> dist.destroy_process_group()
        """
        settings = settings or AgentSettings()
        return cls(layers, settings, meet(layers, host_group, settings, token_group), on_commit)

    @property
    def installed(self) -> RankLayout:
        """This rank's current layout. The object is immutable, and each commit replaces it."""
        return self._switch.state.installed

    @property
    def stats(self) -> SwitchStats:
        """Counts and durations of this rank's switches since the agent started."""
        return self._switch.stats

    @property
    def halted(self) -> str | None:
        """Reason why this rank must not serve any more tokens, or ``None``."""
        return None if self._fatal is None else str(self._fatal)

    @property
    def votes_lost(self) -> str | None:
        """Reason why the ranks are not voting at the moment, or ``None``. Voting resumes without intervention."""
        votes_lost = self._switch.state.votes_lost
        return (
            None
            if votes_lost is None
            else "; ".join(filter(None, (votes_lost, self._switch.votes.complaint)))
        )

    @property
    def connected(self) -> bool:
        """True while the control stream to the service is open."""
        return self._stream.connected

    @_contained()
    def step(self, phase: StepPhase = StepPhase.DECODE, tokens: int | None = None) -> None:
        """Record that a forward pass has been queued. The model's thread calls this on every rank, between two passes.

        On a device, call it on the stream on which the passes are queued. The agent reads and writes the layers only on
        that stream: it reads heat after the pass that counted it, and commits between two passes. It synchronises with
        the device only before it commits a layer, because it must know which queued pass the commit follows. The
        host-clock time between two calls is reported as the step time.

        The only network wait is for the slowest rank's ballot, which nearly always arrives before the model's own
        collectives complete. Errors other than ``FatalSwitchError`` stop balancing, but not the model.

        A missed or repeated call loses heat and, at worst, delays a step. It never causes wrong output, because layers
        switch at numbered forward passes.

        Parameters
        ----------
        phase
            Phase of the pass: prefill, decode, mixed or dummy.
        tokens
            Number of this rank's own tokens in the pass, excluding padding; ``None`` if unknown. If several ranks share
            tokens, the first of them reports the tokens and the rest report 0.

        Raises
        ------
        FatalSwitchError
            If this rank cannot know which weights its peers route to. The rank must not serve any more tokens, and
            every later call raises the error again.
        """
        if self._fatal is not None:
            raise self._fatal
        with self._in_calls:
            self._boundary(phase, tokens)

    @_contained()
    def drain(self, reason: str = "requested by the host") -> None:
        """Complete or abort the switch in progress, and reject plans until ``resume`` is called.

        This is a collective: every rank calls it between the same two forward passes, before the model sleeps or loads
        other weights. It takes at most one transfer timeout. Once it returns, the agent no longer reads or writes the
        layers' weights, and the host may change weights in place, but not their placement.

        Parameters
        ----------
        reason
            Reason for the abort, to be reported by the service.

        Raises
        ------
        FatalSwitchError
            See ``step``.
        """
        # The host is about to change weights, so no plan may start even if a later call fails.
        self._guarded(self._switch.pause, reason)
        self._timer.pause()
        self._guarded(self._switch.drain, reason)
        # The host may free the memory of the heat rings.
        self._guarded(self._heat.cut, self.installed.layer_epochs)
        self._guarded(self._publish_heat)

    @_contained(RestoreError)
    def restore(self, placement: Placement, reason: str = "the host is loading weights") -> None:
        """Drain, then move every expert to its slot in ``placement``, and reject plans until ``resume`` is called.

        Some hosts can only load weights into their own initial layout. They restore the initial placement, load the
        weights, and resume. Like ``drain``, this is a collective. It takes as long as the transfers of all layers that
        differ from ``placement``.

        Parameters
        ----------
        placement
            Placement of all ranks, usually the initial value of ``installed.placement``.
        reason
            Reason for the abort, to be reported by the service.

        Raises
        ------
        RestoreError
            If a layer could not be restored. Every rank raises it. Each layer then uses either its previous placement
            or ``placement``.
        FatalSwitchError
            See ``step``.
        """
        self._guarded(self._switch.pause, reason)
        self._timer.pause()
        self._guarded(self._switch.restore, placement, reason)
        self._guarded(self._switch.pause, reason)
        self._guarded(self._publish_heat)
        current = self.installed.placement
        differing = np.flatnonzero((current.phy2log_LRS != placement.phy2log_LRS).any(axis=(1, 2)))
        if differing.size:
            raise RestoreError(
                f"could not restore the experts of {differing.size} layers: "
                f"{self.halted or self.votes_lost or 'the ranks dropped the plan'}"
            )

    @_contained()
    def resume(self) -> None:
        """Resume accepting plans after ``drain`` or ``restore``."""
        self._switch.resume()

    @_contained()
    def close(self, timeout: float = 5.0) -> None:
        """Stop voting, and stop all agent threads. The model can keep serving with the current layout.

        Ranks may call this at different times. Once the first rank has called it, the other ranks stop balancing.

        Parameters
        ----------
        timeout
            Maximum time to wait for the control stream to end, in seconds.

        Raises
        ------
        FatalSwitchError
            See ``step``.
        """
        try:
            self._guarded(self._stream.close, timeout)
            self._switch.close()
        finally:
            self._history.close(self._step)

    # Work done at each step boundary, in order

    def _boundary(self, phase: StepPhase, tokens: int | None) -> None:
        if self._unfinished:
            self._guarded(self._switch.stumble, "the previous call failed with an error")
        self._unfinished = True
        previous = self._step
        self._guarded(self._count_call)
        if self._step > previous:
            self._guarded(self._record, phase, tokens, self._step - previous)
        self._guarded(self._take_events)
        if self._step > previous:
            with self._in_votes:
                self._guarded(self._switch.vote, self._step)
        self._guarded(self._publish_heat)
        if self.identity.rank == 0 and self._step // self._log_interval > previous // self._log_interval:
            self._guarded(self._log_balance)
        self._unfinished = False

    def _count_call(self) -> None:
        self._step = max(self._step, self._clock.called())
        self._switch.budget.refill()

    def _record(self, phase: StepPhase, tokens: int | None, passes: int) -> None:
        micros = self._timer.lap(passes)
        welcome = self._stream.welcome
        if welcome is not None:
            self._adopt(welcome.report_steps, self._stream.reporting)
            self._switch.record_term(welcome.leader_term)
        self._heat.step_done(
            self._step - 1, phase, self.installed.layer_epochs, tokens, micros, self._clock.base
        )

    def _adopt(self, report_steps: int, reporting: Reporting) -> None:
        """Start reporting the requested heat, and remove queued reports that are no longer requested."""
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
        self._switch.process_events(self._step, orders)

    def _log_balance(self) -> None:
        """Log the deployment's balance, which only the service knows."""
        rank = self.identity.rank
        balance = self._stream.balance
        if balance is None:
            _log.info("rank %d: step %d: PAR unknown, because the service has not sent it", rank, self._step)
            return
        par = f"{balance.par:.3f}"
        switched = self.stats.layers_switched
        text = "rank %d: step %d: PAR %s over the last %d steps, %d layers switched so far"
        _log.info(text, rank, self._step, par, balance.steps, switched)

    def _beat(self) -> Heartbeat:
        installed = self.installed
        return Heartbeat(
            step=self._step,
            epoch=installed.epoch,
            digest=installed.digest,
            error=self.halted
            or self._clock.complaint
            or self.votes_lost
            or self._switch.complaint
            or self._heat.complaint
            or "",
            calls=self._clock.calls,
            call_micros=self._in_calls.micros,
            vote_micros=self._in_votes.micros,
            staging_bytes=self._switch.transfers.staging.nbytes,
            ring_bytes=self._heat.ring_bytes,
        )

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run one part of a host's call. If it raises an error, voting stops until the ranks open a new vote link."""
        try:
            call(*arguments)
        except BaseException as error:
            self._recover(error)

    def _recover(self, error: BaseException) -> None:
        """Leave the vote link after an error, so that votes stay consistent across ranks.

        Only fatal errors and interrupts such as ``KeyboardInterrupt`` are raised.
        """
        fatal = _find_fatal(error)
        if fatal is not None:
            self._halt(fatal)
            raise fatal
        if self.votes_lost is None:
            _log.error(
                "rank %d: the agent failed; the model keeps serving", self.identity.rank, exc_info=error
            )
        try:
            self._switch.stumble(f"{type(error).__name__}: {error}")
        except FatalSwitchError as diverged:
            self._halt(diverged)
            if isinstance(error, Exception):
                raise
        if not isinstance(error, Exception):
            raise error

    def _halt(self, fatal: FatalSwitchError) -> None:
        self._fatal = fatal
        self._switch.fail(str(fatal))


def _find_fatal(error: BaseException | None) -> FatalSwitchError | None:
    """Return the first fatal error among ``error`` and its chained contexts, or ``None`` if there is none."""
    while error is not None and not isinstance(error, FatalSwitchError):
        error = error.__context__
    return error
