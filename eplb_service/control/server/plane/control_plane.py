"""All deployments of a service: who comes and goes, what ranks report, and the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import structlog

from eplb_service.control.core.assembly import Assembly
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.membership import rank_list
from eplb_service.control.server.bounded_log import BoundedLog
from eplb_service.control.server.deciding.planning import Decider
from eplb_service.control.server.deciding.priors import PriorError, Priors
from eplb_service.control.server.observing.deployment_metrics import reporting
from eplb_service.control.server.observing.observer import Observer
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from eplb_service.control.server.outgoing.reporting import ReportingPolicy
from eplb_service.control.server.outgoing.streams import RankStream, Streams
from eplb_service.control.server.plane.bounds import limits_of, pending_steps
from eplb_service.control.server.plane.consequences import Consequences
from eplb_service.control.server.plane.heat_budget import HeatBudget
from eplb_service.control.server.plane.known_deployments import KnownDeployments
from eplb_service.control.server.plane.orders import Orders
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.control.server.store.stored import StoredPlacement
from eplb_service.io.recording import Recording
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.hello import Hello
from eplb_service.wire.status import Heartbeat, PlanState, PlanStatus

_log = structlog.get_logger(__name__)

_END = object()
_STEPS_AT_A_TIME = 4
"""Whole steps put together before the event loop comes to something else: one of 1,024 ranks takes a millisecond."""


class ControlPlane:
    """Carries calls to the deployments' state machines, and sees to what follows.

    Parameters
    ----------
    settings
        Of the service.
    writer, metrics
        Where history and figures go.
    recording
        Where heat goes, if it is recorded.

    ``log`` takes what strangers can cause; ``feed`` hands heat on; ``reporting`` says what is reported; ``observer``
    keeps what pictures are made of; ``orders`` carries out what operators order.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        writer: StoreWriter,
        metrics: Metrics,
        recording: Recording | None = None,
    ) -> None:
        self.settings = settings
        self.streams = Streams()
        self.observer = Observer()
        self.decider = Decider(
            settings.planner(), settings.solve_timeout_seconds, writer, self.streams, metrics, self.observer
        )
        self.log = BoundedLog(metrics.service.log_lines_left_out.inc)
        self._priors = Priors(settings.prior or "", settings.window_steps)
        self._writer = writer
        self._metrics = metrics
        self.feed = HeatFeed(recording, pending_steps(settings))
        self.reporting = ReportingPolicy(self.streams, self.feed)
        limits = limits_of(settings)
        self._known = KnownDeployments(settings, limits, writer, metrics)
        self._budget = HeatBudget(limits, settings.max_heat_bytes)
        self._consequences = Consequences(writer, metrics, self.feed, self.streams)
        self.orders = Orders(writer, self.streams, self._consequences)

    @property
    def leader_term(self) -> int:
        """Of this start."""
        return self._writer.store.leader_term

    @property
    def deployments(self) -> Mapping[str, Deployment]:
        """All that are known, by name."""
        return self._known.by_name

    @property
    def remembered(self) -> Mapping[str, StoredPlacement]:
        """What deployments served when their last service, or the last of their ranks, stopped."""
        return self._known.remembered

    async def resume(self) -> None:
        """Take up what the store remembers."""
        await self._known.resume()
        self._metrics.service.leader_term.set(self.leader_term)
        _log.info("resumed", leader_term=self.leader_term, deployments=len(self.deployments))

    def find(self, name: str) -> Deployment:
        """A known deployment; raises ``UnknownDeploymentError``."""
        return self._known.find(name)

    # Agents

    def admit(self, hello: Hello, stream: RankStream, assembly: Assembly | None = None) -> Deployment:
        """Take a rank in, the last one with what all serve; raises ``RefusedError`` where its deployment cannot."""
        deployment = self.deployments.get(hello.deployment)
        if deployment is None or deployment.group is None or deployment.group.shape != hello.shape:
            for idle in self._budget.to_rest(hello, self.deployments.values()):
                self._known.rest(idle)
                self._consequences.follow(idle)
        deployment = deployment or self._make_room_for(hello.deployment)
        group = deployment.group
        if deployment.renews(hello) and self._leave_seat(hello):
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello, assembly)
        finally:
            self._consequences.follow(deployment)
        if deployment.group is not None and (group is None or deployment.group.forming != group.forming):
            self._metrics.forget_layers(deployment.name)
            self.observer.regrouped(deployment.name)
            self.streams.replace_all(
                deployment.name, "another forming of the group has taken this one's place"
            )
        self.streams.add(deployment.name, hello.rank, stream)
        self.observer.heard(deployment.name, hello.rank)
        if deployment.outdated is not None:
            self.log.warning("outdated", deployment=deployment.name, reason=deployment.outdated)
        self.log.info(
            "agent_connected", deployment=deployment.name, rank=hello.rank, node=hello.node, epoch=hello.epoch
        )
        return deployment

    def release(self, deployment: Deployment, rank: int, stream: RankStream) -> None:
        """A rank's stream has ended."""
        if not self.streams.remove(deployment.name, rank, stream):
            return
        deployment.leave(rank)
        if not deployment.connected:
            self._known.heard_last(deployment)
        self.log.info("agent_disconnected", deployment=deployment.name, rank=rank)

    def heat_report(
        self, deployment: Deployment, rank: int, report: HeatReport, message: agent_pb2.HeatReport
    ) -> None:
        """Counts have come, decoded from ``message``."""
        name = deployment.name
        self.observer.heard(name, rank)
        gained = deployment.heat_report(rank, report)
        if self.reporting.is_asked_for(deployment, report):
            self.feed.counted(name, rank, report, message)
        if any(gained):
            self._metrics.agents.steps_received.labels(name).inc(gained.received)
            self._metrics.agents.steps_lost.labels(name).inc(gained.lost)
        if gained.lost and deployment.heat is not None:
            behind, step = deployment.heat.slowest
            self.log.info(
                "heat_lost", deployment=name, steps=gained.lost, slowest_rank=behind, reported_to=step
            )

    def put_together(self, deployment: Deployment) -> bool:
        """Put a few of the steps together that are whole, and decide where enough are; whether there are more."""
        if deployment.heat is None or not deployment.heat.waiting:
            return False
        more = deployment.put_together(_STEPS_AT_A_TIME)
        if deployment.is_due(self.settings.decision_interval) and self.decider.may_decide(deployment.name):
            self.decider.start(deployment)
        return more

    def heartbeat(self, deployment: Deployment, rank: int, heartbeat: Heartbeat) -> None:
        """A rank is alive."""
        self.observer.heard(deployment.name, rank)
        took = self.observer.took(deployment.name, rank, heartbeat)
        if took is not None:
            self._metrics.agents.called(deployment.name, *took)
        deployment.heartbeat(rank, heartbeat)
        self._consequences.follow(deployment)

    def plan_status(self, deployment: Deployment, rank: int, status: PlanStatus) -> None:
        """A rank reports what became of a plan."""
        self.observer.heard(deployment.name, rank)
        if status.state is PlanState.TRANSFERRED:
            self._metrics.plans.transferred(deployment.name, status.transfer_seconds)
        elif status.state is PlanState.COMMITTED:
            self._metrics.plans.committed(deployment.name, status.commit_seconds)
        deployment.plan_status(rank, status, time.monotonic())
        self._consequences.follow(deployment)

    # Time

    def tick(self) -> None:
        """Look after deadlines and update the metrics; called every second or so."""
        for _ in self.ticking():
            pass

    def ticking(self) -> Iterator[None]:
        """What ``tick`` does, a part at a time: with many ranks the whole would hold the event loop for long."""
        self._metrics.service.deployments.set(len(self.deployments))
        self._consequences.watch_store(self.deployments.values())
        self._metrics.service.heat_bytes.set(sum(map(self._budget.price, self.deployments.values())))
        for deployment in list(self.deployments.values()):
            for parts in (self._looking_after(deployment), self._showing(deployment)):
                yield from self._while_known(deployment, parts)

    def _while_known(self, deployment: Deployment, parts: Iterator[None]) -> Iterator[None]:
        """The parts of one deployment's tick; it may be forgotten between them."""
        begun = True
        while begun:
            yield
            if self.deployments.get(deployment.name) is not deployment:
                return
            try:
                begun = next(parts, _END) is not _END
            except Exception:
                # One deployment's trouble is not the others'.
                _log.exception("tick_failed", deployment=deployment.name)
                return

    def _looking_after(self, deployment: Deployment) -> Iterator[None]:
        deployment.tick(time.monotonic())
        self._consequences.follow(deployment)
        yield
        if self._known.has_expired(deployment):
            _log.info("deployment_expired", deployment=deployment.name)
            self.forget(deployment.name)
        else:
            self.reporting.follow_up(deployment)
            self._begin(deployment)

    def _showing(self, deployment: Deployment) -> Iterator[None]:
        yield from reporting(deployment, self._metrics, self.observer)
        yield
        self.observer.tick(deployment)

    def _begin(self, deployment: Deployment) -> None:
        """Make the first plan by the heat of a deployment's prior, as soon as its ranks are together."""
        if not deployment.may_begin or not self.decider.may_decide(deployment.name):
            return
        try:
            prior = self._priors.of(deployment, self.deployments)
        except PriorError as error:
            _log.warning("prior_not_used", deployment=deployment.name, reason=str(error))
            deployment.beginning(f"no first plan was made: {error}")
            return
        if prior is not None:
            _log.info("begins_by_prior", deployment=deployment.name, source=prior.source)
            self.decider.start(deployment, prior)

    def remember_all(self) -> None:
        """Before the service stops."""
        for deployment in self.deployments.values():
            if deployment.known or deployment.paused:
                self._consequences.remember(deployment)

    # Which deployments are known

    def _make_room_for(self, name: str) -> Deployment:
        """A new deployment; raises ``ExhaustedError`` where there are as many as there may be."""
        other = self._known.in_the_way()
        if other is not None:
            self.forget(other)
        return self._known.add(name)

    def _leave_seat(self, hello: Hello) -> bool:
        reason = f"rank {hello.rank} has connected again; the newer stream of its forming is heard"
        return self.streams.replace(hello.deployment, hello.rank, reason)

    def forget_departed(self, deployment: Deployment) -> None:
        """Remove a deployment for an operator; raises ``ConflictError`` where ranks would bring it back at once."""
        if deployment.connected:
            here = rank_list(sorted(member.rank for member in deployment.connected))
            raise ConflictError(
                f"{here} of {deployment.name!r} still connected; stop the engines, or the agents, first"
            )
        self.forget(deployment.name)

    def forget(self, name: str) -> None:
        """Remove a deployment, and all that is known of it."""
        self.decider.drop(name)
        self.streams.replace_all(name, "the deployment was removed; say Hello again")
        self._known.forget(name)
        self._metrics.forget(name)
        self.observer.forget(name)
        self.reporting.forget(name)
        _log.info("deployment_forgotten", deployment=name)
