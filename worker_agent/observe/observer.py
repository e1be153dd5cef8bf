"""Observer in an inference rank: records heat and step times, and never touches the engine.

An engine's module calls ``before_pass`` and ``after_pass`` around each forward pass, on every rank. It calls ``placed``
when the engine itself has moved experts.
"""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import Heartbeat, Shape
from worker_agent.adapters.engine_host import HeatRings
from worker_agent.device import device_name
from worker_agent.forward_clock import ForwardClock, StepTimer, Stopwatch
from worker_agent.heat import HeatRecorder
from worker_agent.live_layer import LiveLayer
from worker_agent.modes import has_service
from worker_agent.observe.layout import ObservedLayout, moved
from worker_agent.observe.local import LocalReports, Store
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings, misspelt_settings
from worker_agent.stream import Outbox, ServiceStream
from worker_agent.swap.rank_layout import Identity, RankLayout

log = logging.getLogger("eplb.agent")

_REPORT_STEPS = 16
"""Number of steps per report until a service requests a different number."""
_WATCH_CALLS = 16
"""Number of calls between checks that the control stream's thread is alive."""
_LAYOUTS_KEPT = 8
"""Number of recent layouts whose reports may still be on their way from the device."""

_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Ranks:
    """Facts about the observed ranks, equal on all of them except for ``rank``.

    Parameters
    ----------
    rank
        Index of this rank.
    group_id
        Random id of the group.
    token_groups
        Token group of each rank. Ranks of one group have the same tokens, which its first rank counts.
    """

    rank: int
    group_id: str
    token_groups: tuple[int, ...]

    @classmethod
    def alone(cls) -> Ranks:
        """Return the facts for an engine with a single rank."""
        return cls(0, uuid.uuid4().hex, (0,))

    @property
    def counting(self) -> list[int]:
        """Ranks that count tokens: the first rank of each token group."""
        return sorted({self.token_groups.index(group) for group in self.token_groups})

    @property
    def counts(self) -> bool:
        """True if this rank counts tokens."""
        return self.rank in self.counting


def meet(facts: Any, token_group: int | None, group: dist.ProcessGroup | None) -> tuple[Ranks, list[Any]]:
    """Exchange facts among the ranks of an engine's CPU process group (collective). Called once, at the start.

    Parameters
    ----------
    facts
        Any facts about this rank.
    token_group
        ID of this rank's token group, or ``None`` if no other rank has its tokens.
    group
        The group; ``None`` for an engine with a single rank.

    Returns
    -------
    Ranks
        Facts about the ranks.
    list
        ``facts`` of each rank.
    """
    if group is None or dist.get_world_size(group) == 1:
        return Ranks.alone(), [facts]
    rank = dist.get_rank(group)
    received: list[Any] = [None] * dist.get_world_size(group)
    sent = uuid.uuid4().hex, rank if token_group is None else token_group, facts
    dist.all_gather_object(received, sent, group=group)
    groups = tuple(number for _, number, _ in received)
    return Ranks(rank, received[0][0], groups), [rank_facts for _, _, rank_facts in received]


class _Stoppable(Protocol):
    @property
    def stopped(self) -> bool:
        """True once an error has ended the observation."""

    def stop(self, error: Exception) -> None:
        """End the observation because of an error."""


_Self = TypeVar("_Self", bound=_Stoppable)


def harmless(
    method: Callable[Concatenate[_Self, _Arguments], None],
) -> Callable[Concatenate[_Self, _Arguments], None]:
    """Return a method that ends the observation if an error occurs, and never raises one into the engine."""

    @functools.wraps(method)
    def call(self: _Self, /, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        if self.stopped:
            return
        try:
            method(self, *arguments, **keywords)
        except Exception as error:
            self.stop(error)

    return call


class Observer:
    """Records one rank's heat and step times, and reports them.

    With a service, reports go to the service, which makes no plans for the deployment. Without one, the first rank
    writes log lines and a trace file.

    Parameters
    ----------
    rings
        Heat rings that the engine's module fills.
    layout
        Layout that the engine serves.
    ranks
        Facts about the observed ranks.
    settings
        Settings of the agent.
    store
        Store that all ranks share, needed without a service if several ranks count tokens.
    has_service
        True to send reports to the service in ``settings``.
    runtime
        Clock and threads to use.

    Attributes
    ----------
    stopped
        True once an error has ended the observation.
    """

    def __init__(
        self,
        rings: HeatRings,
        layout: ObservedLayout,
        ranks: Ranks,
        settings: AgentSettings,
        store: Store | None = None,
        *,
        has_service: bool = True,
        runtime: Runtime = REAL,
    ) -> None:
        self.stopped = False
        self._rings = rings
        self._ranks = ranks
        self._settings = settings
        self._runtime = runtime
        self._layout = layout
        self._installed = layout.rank(ranks.rank)
        self._shares = deque([(self._installed.layer_epochs, layout.shares_LER)], maxlen=_LAYOUTS_KEPT)
        self._pending: list[ObservedLayout] = []
        self._heat: HeatRecorder | None = None
        self._step = 0
        self._timer = StepTimer()
        self._in_calls = Stopwatch()
        self._outbox = Outbox(runtime=runtime)
        self._stream: ServiceStream | None = None
        self._local: LocalReports | None = None
        if has_service:
            identity = self._identity(layout)
            self._stream = ServiceStream(
                settings, identity, self._outbox, lambda: self._installed, lambda: 0, self._beat, runtime
            )
        else:
            self._local = LocalReports(
                settings, ranks.rank, ranks.counting, store, f"eplb-observe/{ranks.group_id}", runtime
            )

    @classmethod
    def start(
        cls, rings: HeatRings, layout: ObservedLayout, ranks: Ranks, engine: str, note: str = ""
    ) -> Observer:
        """Start observing with the settings from the environment, and log this on rank 0.

        Parameters
        ----------
        rings
            Heat rings that the engine's module fills.
        layout
            Layout that the engine serves.
        ranks
            Facts about the observed ranks.
        engine
            Name of the engine.
        note
            Further sentence for the log.
        """
        settings = AgentSettings()
        for complaint in misspelt_settings(os.environ):
            log.warning("%s", complaint)
        service = has_service()
        store = None if service or len(ranks.counting) == 1 else _shared_store()
        observer = cls(rings, layout, ranks, settings, store, has_service=service)
        if ranks.rank == 0:
            layers, size, slots = layout.phy2log_LRS.shape
            if service:
                target = f"reports go to deployment {settings.deployment} at {settings.service}"
            else:
                trace = (
                    f", and the newest steps are written to {settings.trace}"
                    if settings.trace is not None
                    else ""
                )
                target = f"balance is logged here every {settings.log_interval_steps} forward passes{trace}"
            log.info(
                "eplb-agent observes %d MoE layers of %d experts over %d ranks of %d slots in %s; %s%s",
                layers,
                layout.experts,
                size,
                slots,
                engine,
                target,
                f". {note}" if note else "",
            )
        # Engines may end their processes without running ``atexit``.
        Finalize(observer, cls.close, (observer,), exitpriority=10)
        return observer

    @property
    def installed(self) -> RankLayout:
        """Layout that is reported for this rank."""
        return self._installed

    @property
    def layout(self) -> ObservedLayout:
        """Layout that the engine serves, including changes that have not been reported yet."""
        return self._pending[-1] if self._pending else self._layout

    @harmless
    def before_pass(self) -> None:
        """Prepare for a forward pass. It is reported under the layout that was last passed to ``placed``."""
        if self._heat is None:
            self._begin()
        while self._pending:
            self._follow(self._pending.pop(0))

    @harmless
    def after_pass(self, phase: StepPhase, tokens: int | None) -> None:
        """Record a forward pass that has been queued and whose row has been written to the rings.

        Parameters
        ----------
        phase
            Phase of the pass.
        tokens
            This rank's own tokens, without padding; ``None`` if unknown. Ranks that share tokens report them once.
        """
        heat = self._heat
        if heat is None:
            return
        with self._in_calls:
            previous = self._step
            self._step = max(previous, self._clock.called())
            if self._step > previous:
                micros = self._timer.lap(self._step - previous)
                self._adopt(heat)
                heat.step_done(
                    self._step - 1, phase, self._installed.layer_epochs, tokens, micros, self._clock.base
                )
            self._publish(heat)

    @harmless
    def placed(self, layout: ObservedLayout) -> None:
        """Store the layout that the engine serves from the next pass on."""
        self._pending.append(layout)

    def stop(self, error: Exception) -> None:
        """End the observation because of an error, which is logged."""
        self.stopped = True
        log.error(
            "rank %d: eplb-agent no longer observes this engine, which is not affected",
            self._ranks.rank,
            exc_info=error,
        )
        self.close(timeout=0.0)

    def close(self, timeout: float = 5.0) -> None:
        """Stop all threads. Without a service, write the trace file."""
        if self._heat is not None and not self.stopped:
            self._heat.cut(self._installed.layer_epochs)
            self._publish(self._heat)
        self.stopped = True
        if self._stream is not None:
            self._stream.close(timeout)
        if self._local is not None:
            self._local.close(timeout)

    def _begin(self) -> None:
        """Start numbering passes. Earlier passes, from the engine's warm-up, are not counted as lost steps."""
        sources_LWE = self._rings.sources_LWE
        assert sources_LWE is not None
        layers = cast(
            "list[LiveLayer]",
            [
                SimpleNamespace(moe_load=None, source_load=ring_WE, load_counter=self._rings.passes)
                for ring_WE in sources_LWE.unbind()
            ],
        )
        self._clock = ForwardClock(layers, self._runtime)
        self._heat = HeatRecorder(layers, _REPORT_STEPS)

    def _follow(self, layout: ObservedLayout) -> None:
        """Report later passes under a new layout."""
        installed = moved(self._installed, layout)
        if self._heat is not None:
            self._heat.cut(self._installed.layer_epochs)
        self._layout = layout
        self._installed = installed
        self._shares.append((installed.layer_epochs, layout.shares_LER))

    def _adopt(self, heat: HeatRecorder) -> None:
        """Report in the way that the service requests, and keep the stream's thread alive."""
        if self._stream is None:
            return
        if self._step % _WATCH_CALLS == 0:
            self._stream.keep_alive()
        welcome = self._stream.welcome
        if welcome is not None:
            reporting = self._stream.reporting
            changed = reporting != heat.reporting
            heat.adopt(reporting.report_steps or welcome.report_steps, reporting)
            if changed:
                self._outbox.thin(lambda report: heat.wants(report.first_step))

    def _publish(self, heat: HeatRecorder) -> None:
        for report in heat.take():
            if self._local is None:
                self._outbox.put(report)
                continue
            for epochs, shares_LER in self._shares:
                if epochs == report.layer_epochs:
                    self._local.put(report, shares_LER)
                    break
        self._outbox.lost_steps = heat.lost_steps

    def _beat(self) -> Heartbeat:
        installed = self._installed
        heat = self._heat
        return Heartbeat(
            step=self._step,
            epoch=installed.epoch,
            digest=installed.digest,
            error="this rank no longer observes the engine"
            if self.stopped
            else (heat and heat.complaint) or "",
            calls=self._step,
            call_micros=self._in_calls.micros,
            ring_bytes=0 if heat is None else heat.ring_bytes,
        )

    def _identity(self, layout: ObservedLayout) -> Identity:
        layers, size, slots = layout.phy2log_LRS.shape
        shape = Shape(
            size,
            layers,
            layout.experts,
            slots,
            bytes_per_expert=0,
            width=layout.width,
            rank_bound=True,
            entry_by_row=layout.width > 1,
            observed=True,
        )
        return Identity(
            deployment=self._settings.deployment,
            group_id=self._ranks.group_id,
            rank=self._ranks.rank,
            node=self._settings.node,
            token_groups=self._ranks.token_groups,
            shape=shape,
            device=device_name(self._rings.passes.device),
        )


class NotObservedError(Exception):
    """An engine or model cannot be observed. The message is the reason."""


def not_observed(reason: str) -> None:
    """Log why an engine is not observed. Called once, at the start."""
    log.warning("eplb-agent is NOT observing this engine, which keeps serving unchanged: %s", reason)


def without_expert_parallelism(ranks: int) -> str:
    """Return the sentence that explains the imbalance of an engine without expert parallelism."""
    return f"Expert parallelism is off; the imbalance shown is that of expert parallelism over {ranks} ranks"


def _shared_store() -> Store | None:
    """Return the store that torch's ranks used to find each other."""
    from torch.distributed import distributed_c10d

    return cast("Store", distributed_c10d._get_default_store())
