"""All deployments of a service: who comes and goes, what ranks report, and the clock."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator

import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError, ExhaustedError, UnknownDeploymentError
from eplb_service.control.core.membership import rank_list
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.server.bounded_log import BoundedLog
from eplb_service.control.server.deciding.decision_outcome import DECISION_RESULTS
from eplb_service.control.server.deciding.planning import Decider
from eplb_service.control.server.deciding.priors import PriorError, Priors
from eplb_service.control.server.observing.deployment_metrics import report
from eplb_service.control.server.observing.observer import Observer
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from eplb_service.control.server.outgoing.reporting import ReportingPolicy
from eplb_service.control.server.outgoing.streams import RankStream, Streams
from eplb_service.control.server.plane.bounds import limits_of, pending_steps
from eplb_service.control.server.plane.consequences import Consequences
from eplb_service.control.server.plane.heat_budget import HeatBudget
from eplb_service.control.server.plane.orders import Orders
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.control.server.store.stored import StoredPlacement
from eplb_service.io.recording import Recording
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.fields import check_deployment
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.hello import Hello
from eplb_service.wire.status import Heartbeat, PlanState, PlanStatus

_log = structlog.get_logger(__name__)

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

    ``log`` takes what strangers can cause; ``remembered`` holds what a deployment served when the last service stopped;
    ``feed`` hands heat on; ``reporting`` says what is reported; ``observer`` keeps what pictures are made of;
    ``orders`` carries out what operators order.
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
        self.deployments: dict[str, Deployment] = {}
        self.remembered: dict[str, StoredPlacement] = {}
        self.log = BoundedLog(metrics.service.log_lines_left_out.inc)
        self._priors = Priors(settings.prior or "", settings.window_steps)
        self._writer = writer
        self._metrics = metrics
        self.feed = HeatFeed(recording, pending_steps(settings))
        self.reporting = ReportingPolicy(self.streams, self.feed)
        self._limits = limits_of(settings)
        self._budget = HeatBudget(self._limits, settings.max_heat_bytes)
        self._consequences = Consequences(writer, metrics, self.feed, self.streams)
        self.orders = Orders(writer, self.streams, self._consequences)

    @property
    def leader_term(self) -> int:
        """Of this start."""
        return self._writer.store.leader_term

    async def resume(self) -> None:
        """Take up what the store remembers."""
        for stored in await self._writer.run(self._writer.store.deployments):
            deployment = self._new(stored.name)
            deployment.leader_term = max(self.leader_term, stored.leader_term)
            deployment.paused, deployment.last_decision = stored.paused, stored.last_decision
            deployment.totals, deployment.known = stored.totals, True
            try:
                placement = await self._writer.run(self._writer.store.latest_placement, stored.name)
                if placement is not None:
                    self.remembered[stored.name] = placement
                deployment.first_layout = await self._writer.run(self._writer.store.first_layout, stored.name)
            except (sqlite3.DatabaseError, ValueError) as error:
                _log.error("stored_placement_unreadable", deployment=stored.name, reason=str(error))
        self._metrics.service.leader_term.set(self.leader_term)
        _log.info("resumed", leader_term=self.leader_term, deployments=len(self.deployments))

    def find(self, name: str) -> Deployment:
        """A known deployment; raises ``UnknownDeploymentError``."""
        check_deployment(name, "deployment")
        if name not in self.deployments:
            raise UnknownDeploymentError(
                f"no deployment {name!r}; `eplb deployments` lists those that are known"
            )
        return self.deployments[name]

    # Agents

    def admit(self, hello: Hello, stream: RankStream) -> Deployment:
        """Take a rank in; raises ``RefusedError`` where its deployment cannot."""
        deployment = self.deployments.get(hello.deployment)
        if deployment is None or deployment.group is None or deployment.group.shape != hello.shape:
            for idle in self._budget.to_rest(hello, self.deployments.values()):
                self._rest(idle)
        deployment = deployment or self._make_room_for(hello.deployment)
        group = deployment.group
        if deployment.renews(hello) and self._leave_seat(hello):
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello)
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
        if not deployment.connected and self.deployments.get(deployment.name) is deployment:
            # Deployments are kept in the order in which they were last heard of.
            self.deployments[deployment.name] = self.deployments.pop(deployment.name)
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
            for part in (self._look_after, self._show):
                yield
                # It may have been forgotten meanwhile.
                if self.deployments.get(deployment.name) is not deployment:
                    continue
                try:
                    part(deployment)
                except Exception:
                    # One deployment's trouble is not the others'.
                    _log.exception("tick_failed", deployment=deployment.name)

    def _look_after(self, deployment: Deployment) -> None:
        deployment.tick(time.monotonic())
        self._consequences.follow(deployment)
        if self._expired(deployment):
            _log.info("deployment_expired", deployment=deployment.name)
            self.forget(deployment.name)
        else:
            self.reporting.follow_up(deployment)
            self._begin(deployment)

    def _show(self, deployment: Deployment) -> None:
        report(deployment, self._metrics, self.observer)
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

    def _new(self, name: str) -> Deployment:
        self.deployments[name] = Deployment(name, self._limits, leader_term=self.leader_term)
        self._metrics.expect(name, DECISION_RESULTS, [outcome.value for outcome in Outcome])
        return self.deployments[name]

    def _make_room_for(self, name: str) -> Deployment:
        """A new deployment; only names behind which no whole group has ever been make room for it."""
        if len(self.deployments) >= self.settings.max_deployments:
            unknown = [one for one in self.deployments.values() if not (one.known or one.paused)]
            idle = [one for one in unknown if not one.connected or one.attendance.forming_overdue]
            if not idle:
                raise ExhaustedError(
                    f"{len(self.deployments)} deployments are known, the most that max_deployments allows"
                )
            self.forget(idle[0].name)
        return self._new(name)

    def _rest(self, deployment: Deployment) -> None:
        """Give back the memory of a deployment that nobody is connected to."""
        if deployment.live is not None:
            live = deployment.live
            self.remembered[deployment.name] = StoredPlacement(live.epoch, live.digest, live.placement)
        deployment.rest()
        self._consequences.follow(deployment)

    def _leave_seat(self, hello: Hello) -> bool:
        reason = f"rank {hello.rank} has connected again; the newer stream of its forming is heard"
        return self.streams.replace(hello.deployment, hello.rank, reason)

    def _expired(self, deployment: Deployment) -> bool:
        """Whether all ranks left so long ago that none is expected back; one that is paused waits for its operator."""
        departed, limit = deployment.attendance.departed_since, self.settings.forget_after_seconds
        return (
            bool(limit)
            and not (departed is None or deployment.paused)
            and time.monotonic() - departed > limit
        )

    def forget_departed(self, deployment: Deployment) -> None:
        """Remove a deployment for an operator; raises ``ConflictError`` where ranks would bring it back at once."""
        if deployment.connected:
            here = rank_list([member.rank for member in deployment.connected])
            raise ConflictError(
                f"{here} of {deployment.name!r} still connected; stop the engines, or the agents, first"
            )
        self.forget(deployment.name)

    def forget(self, name: str) -> None:
        """Remove a deployment, and all that is known of it."""
        self.decider.drop(name)
        self.streams.replace_all(name, "the deployment was removed; say Hello again")
        del self.deployments[name]
        self.remembered.pop(name, None)
        self._metrics.forget(name)
        self.observer.forget(name)
        self.reporting.forget(name)
        self._writer.post(self._writer.store.forget, name)
        _log.info("deployment_forgotten", deployment=name)
