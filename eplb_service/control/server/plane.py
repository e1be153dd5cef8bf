"""All deployments of a service, and what follows in the world from what happens to them."""

from __future__ import annotations

import sqlite3
import time

import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError, ExhaustedError, UnknownDeploymentError
from eplb_service.control.core.events import LayerCommitted, PlacementKnown, PlanEnded
from eplb_service.control.core.limits import Limits
from eplb_service.control.core.membership import rank_list
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.core.report_size import FEWEST_STEPS, MOST_STEPS, ReportSize
from eplb_service.control.server.bounded_log import BoundedLog
from eplb_service.control.server.deployment_metrics import report
from eplb_service.control.server.heat_feed import HeatFeed
from eplb_service.control.server.observer import Observer
from eplb_service.control.server.planning import DECISION_RESULTS, Decider
from eplb_service.control.server.priors import PriorError, Priors
from eplb_service.control.server.reporting import ReportingPolicy
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store import higher_term
from eplb_service.control.server.store_writer import StoreWriter
from eplb_service.control.server.stored import StoredDeployment, StoredPlacement, StoredPlan
from eplb_service.control.server.streams import RankStream, Streams
from eplb_service.heat.assembler import memory_bytes
from eplb_service.io.recording import Recording
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.fields import check_deployment
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.hello import Hello
from eplb_service.wire.status import Heartbeat, PlanState, PlanStatus

_log = structlog.get_logger(__name__)

_FEWEST_PENDING_STEPS = 64
_REPORTS_PENDING = 8
_LONG_REPORTS_PENDING = 4
_STEPS_AT_A_TIME = 4
"""Whole steps put together before the event loop comes to something else: one of 1,024 ranks takes a millisecond."""
_MOST_PLANS_LISTED = 100


def pending_steps(settings: ServiceSettings) -> int:
    """Steps that a deployment's fastest rank may be ahead of its slowest before steps are lost."""
    if settings.report_steps == "auto":
        return max(_REPORTS_PENDING * FEWEST_STEPS, _LONG_REPORTS_PENDING * MOST_STEPS)
    return max(_FEWEST_PENDING_STEPS, _REPORTS_PENDING * settings.report_steps)


def report_size(settings: ServiceSettings) -> ReportSize:
    """How many steps the ranks' reports hold at first, and between which bounds."""
    if settings.report_steps != "auto":
        return ReportSize.fixed(settings.report_steps)
    if settings.decide_on == "change":
        # Changes are decided on after a few steps: long reports would make that later.
        return ReportSize()
    return ReportSize.up_to(min(settings.window_steps, settings.decision_interval))


class ControlPlane:
    """Carries calls to the deployments' state machines and their events to store, metrics, logs and streams.

    Parameters
    ----------
    settings
        Of the service.
    writer, metrics
        Where history and figures go.
    recording
        Where heat goes, if it is recorded.

    ``log`` takes what strangers can cause; ``remembered`` holds what a deployment served when the last service stopped;
    ``feed`` hands heat on; ``reporting`` says what is reported; ``observer`` keeps what pictures are made of.
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
        self.log = BoundedLog(metrics.log_lines_left_out.inc)
        self._store_failures = 0
        self._priors = Priors(settings.prior or "", settings.window_steps)
        self._writer = writer
        self._metrics = metrics
        self.feed = HeatFeed(recording, pending_steps(settings))
        self.reporting = ReportingPolicy(self.streams, self.feed)
        self._limits = Limits(
            window_steps=settings.window_steps,
            pending_steps=pending_steps(settings),
            plan_timeout=settings.plan_timeout_seconds,
            first_decision=settings.decision_interval if settings.decide_on == "change" else None,
            report_size=report_size(settings),
        )

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
        self._metrics.leader_term.set(self.leader_term)
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
            self._afford(hello)
        deployment = deployment or self._make_room_for(hello.deployment)
        group = deployment.group
        if deployment.renews(hello) and self._leave_seat(hello):
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello)
        finally:
            self._follow_up(deployment)
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
            self._metrics.steps_received.labels(name).inc(gained.received)
            self._metrics.steps_lost.labels(name).inc(gained.lost)

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
        deployment.heartbeat(rank, heartbeat)
        self._follow_up(deployment)

    def plan_status(self, deployment: Deployment, rank: int, status: PlanStatus) -> None:
        """A rank reports what became of a plan."""
        self.observer.heard(deployment.name, rank)
        if status.state is PlanState.TRANSFERRED:
            self._metrics.transferred(deployment.name, status.transfer_seconds)
        elif status.state is PlanState.COMMITTED:
            self._metrics.committed(deployment.name, status.commit_seconds)
        deployment.plan_status(rank, status, time.monotonic())
        self._follow_up(deployment)

    # Operators

    def set_paused(self, deployment: Deployment, paused: bool) -> None:
        """Stop planning, or plan again."""
        deployment.paused = paused
        self._remember(deployment)
        _log.info("paused" if paused else "resumed_planning", deployment=deployment.name)

    async def lead(self, deployment: Deployment) -> bool:
        """Have the ranks follow this service, whatever term they have followed; whether its term had to be raised.

        Raises ``ConflictError`` where there is no higher one.
        """
        if deployment.group is None or deployment.outdated is None:
            return False
        before, term = deployment.leader_term, higher_term(deployment.group.highest_term)
        # First on disk: after a restart the ranks would refuse a lower one.
        await self._writer.write(self._writer.store.raise_term, deployment.name, term)
        deployment.leader_term = max(deployment.leader_term, term)
        _log.warning("leads", deployment=deployment.name, leader_term=term, before=before)
        self.streams.end(deployment.name, "this service leads from now on; say Hello again")
        return True

    async def history(self, name: str, limit: int) -> list[StoredPlan]:
        """The newest plans of a deployment, newest first, at most ``limit`` of them; 0 for as many as are listed."""
        most = min(limit or _MOST_PLANS_LISTED, _MOST_PLANS_LISTED)
        return await self._writer.run(self._writer.store.plans, name, most)

    # Time

    def tick(self) -> None:
        """Look after deadlines and update the metrics; called every second or so."""
        self._metrics.deployments.set(len(self.deployments))
        self._watch_store()
        self._metrics.heat_bytes.set(sum(map(self._price, self.deployments.values())))
        for deployment in list(self.deployments.values()):
            try:
                deployment.tick(time.monotonic())
                self._follow_up(deployment)
                if self._expired(deployment):
                    _log.info("deployment_expired", deployment=deployment.name)
                    self.forget(deployment.name)
                else:
                    self.reporting.follow_up(deployment)
                    self._begin(deployment)
                    report(deployment, self._metrics, self.observer)
                    self.observer.tick(deployment)
            except Exception:
                # One deployment's trouble is not the others'.
                _log.exception("tick_failed", deployment=deployment.name)

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

    def _watch_store(self) -> None:
        """Say so where the disk does not take what is written, and try again until it does."""
        failures = self._writer.failures
        self._metrics.store_failures.inc(failures - self._store_failures)
        self._store_failures = failures
        failing = self._writer.failing
        for deployment in self.deployments.values():
            deployment.service_problems = (
                (f"the store cannot be written, so that a restart forgets what happens now: {failing}",)
                if failing
                else ()
            )
        known = next((one for one in self.deployments.values() if one.known), None)
        if failing and known is not None:
            self._remember(known)

    def remember_all(self) -> None:
        """Before the service stops."""
        for deployment in self.deployments.values():
            if deployment.known or deployment.paused:
                self._remember(deployment)

    # What follows from events

    def _follow_up(self, deployment: Deployment) -> None:
        store, name = self._writer.store, deployment.name
        for event in deployment.take_events():
            if isinstance(event, PlacementKnown):
                self._writer.post(store.save_placement, name, event.live)
                first = deployment.first_layout
                if first is not None and first.is_what(event.live):
                    self._writer.post(store.save_first_layout, name, first)
                self.feed.placed(deployment, event.live)
                _log.info(
                    "placement_known",
                    deployment=name,
                    epoch=event.live.epoch,
                    digest=f"{event.live.digest:#x}",
                )
            elif isinstance(event, LayerCommitted):
                self._layer_committed(name, event)
            elif isinstance(event, PlanEnded):
                self._plan_ended(deployment, event)
            else:
                _log.warning("streams_outdated", deployment=name, reason=event.reason)
                self.streams.end(name, event.reason)

    def _layer_committed(self, name: str, event: LayerCommitted) -> None:
        self.feed.switched(name, event)
        moves = len(event.update.moves_M5)
        self._metrics.layers_switched.labels(name).inc()
        self._metrics.moves.labels(name).inc(moves)
        self._metrics.moved_bytes.labels(name).inc(event.bytes_moved)
        self._writer.post(self._writer.store.save_layer, name, event.live, event.update.layer)
        _log.info(
            "layer_committed", deployment=name, layer=event.update.layer, epoch=event.live.epoch, moves=moves
        )

    def _plan_ended(self, deployment: Deployment, event: PlanEnded) -> None:
        plan = event.plan
        assert plan.outcome is not None
        plan_id = plan.offer.plan_id
        self.streams.withdraw(deployment.name)
        self._metrics.plans.labels(deployment.name, plan.outcome.value).inc()
        self._writer.post(self._writer.store.end_plan, plan_id, plan.outcome, plan.reason, plan.committed)
        self._remember(deployment)
        _log.info(
            "plan_ended",
            deployment=deployment.name,
            plan_id=plan_id,
            outcome=plan.outcome.value,
            reason=plan.reason,
            committed=plan.committed,
        )

    def _remember(self, deployment: Deployment) -> None:
        stored = StoredDeployment(
            deployment.name, deployment.paused, deployment.totals, deployment.last_decision
        )
        self._writer.post(self._writer.store.save_deployment, stored)

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

    def _price(self, deployment: Deployment) -> int:
        if deployment.group is None:
            return 0
        limits = self._limits
        return memory_bytes(deployment.group.shape, limits.window_steps, limits.pending_steps)

    def _afford(self, hello: Hello) -> None:
        """Make sure that there is memory for what ``hello`` asks for; raises ``ExhaustedError`` where there is not."""
        needed = memory_bytes(hello.shape, self._limits.window_steps, self._limits.pending_steps)
        others = [one for one in self.deployments.values() if one.name != hello.deployment]
        taken = sum(map(self._price, others))
        for idle in [one for one in others if one.group is not None and not one.connected]:
            if taken + needed <= self.settings.max_heat_bytes:
                break
            taken -= self._price(idle)
            self._rest(idle)
        if taken + needed > self.settings.max_heat_bytes:
            raise ExhaustedError(
                f"heat of this shape needs {needed >> 20} MiB, and {taken >> 20} MiB of the "
                f"{self.settings.max_heat_bytes >> 20} MiB that max_heat_bytes allows are taken"
            )

    def _rest(self, deployment: Deployment) -> None:
        """Give back the memory of a deployment that nobody is connected to."""
        if deployment.live is not None:
            live = deployment.live
            self.remembered[deployment.name] = StoredPlacement(live.epoch, live.digest, live.placement)
        deployment.rest()
        self._follow_up(deployment)

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
