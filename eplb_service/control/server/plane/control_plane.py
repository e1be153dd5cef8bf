"""Control plane of all deployments: rank connections, rank reports, operators' commands, and deadlines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Set

import structlog

from eplb_core.wire.agent import Balance, CallOff, Heartbeat, Hello, PlanState, PlanStatus
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.heat import HeatReport
from eplb_core.wire.operator import PastPlan
from eplb_service import __version__
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment, LayerCommitted
from eplb_service.control.core.errors import ConflictError, NotStoredError
from eplb_service.control.core.group import AssembledLayout, rank_list
from eplb_service.control.core.health import recent_step_count
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.control.server.deciding.decider import Decider
from eplb_service.control.server.deciding.priors import PriorError, Priors
from eplb_service.control.server.observer import Observer, gauges
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from eplb_service.control.server.outgoing.streams import RankStream, Streams
from eplb_service.control.server.plane.deployments import KnownDeployments
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store import StoreWriter, higher_term
from eplb_service.control.server.validity import Validity
from eplb_service.telemetry.logs import BoundedLog
from eplb_service.telemetry.metrics import GaugeValue, Metrics

_log = structlog.get_logger(__name__)

_STEPS_PER_TURN = 4
"""Number of steps assembled in one turn of the event loop. With 1,024 ranks, one step takes a millisecond."""
_MAX_PLANS_LISTED = 100


class ControlPlane:
    """Forwards calls to the deployments' state machines, and their events to the store, metrics, logs and streams.

    It has these public attributes, among others: ``deployments`` and their stored states (``remembered``), both keyed
    by name; ``streams`` to the ranks; ``feed``, which sends heat to watchers; and ``observer``, which records data for
    charts.

    Parameters
    ----------
    settings
        Settings of the service.
    writer
        Writer of the store.
    metrics
        Metrics of the service.
    log
        Rate-limited log for lines that clients without credentials can trigger.
    priors
        Priors for first plans; by default those of the setting ``prior``.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        writer: StoreWriter,
        metrics: Metrics,
        log: BoundedLog | None = None,
        priors: Priors | None = None,
    ) -> None:
        self.settings = settings
        self.streams = Streams()
        self.observer = Observer()
        self.decider = Decider(
            settings.planner(), settings.solve_timeout_seconds, writer, self.streams, metrics, self.observer
        )
        self.log = log or BoundedLog(lambda: metrics.count("eplb_log_lines_left_out"))
        self._priors = priors or Priors(settings.prior or "", settings.window_steps)
        self._writer = writer
        self._metrics = metrics
        self._known = known = KnownDeployments(settings, writer, metrics)
        self.deployments = known.by_name
        self.remembered = known.remembered
        self.find = known.find
        self.resume = known.resume
        self.leader_term = writer.store.leader_term
        self.feed = HeatFeed(known.limits.pending_steps)

    # Agents

    def admit(self, hello: Hello, stream: RankStream, assembled: AssembledLayout | None = None) -> Deployment:
        """Register a rank from its Hello; raises ``RejectedError`` if the rank does not fit the group.

        Parameters
        ----------
        hello
            First message of the rank.
        stream
            Stream of the rank.
        assembled
            The group's layout, if this rank completes the group.
        """
        name = hello.deployment
        deployment = self.deployments.get(name)
        if deployment is None or deployment.group is None or deployment.group.shape != hello.shape:
            for idle in self._known.make_room(hello):
                self._follow(idle)
        if deployment is None:
            evicted = self._known.deployment_to_evict()
            if evicted is not None:
                self.log.warning("deployment_made_room", deployment=evicted, new=name)
                self.forget(evicted)
            deployment = self._known.add(name)
        group = deployment.group
        reason = f"rank {hello.rank} has connected again; its new stream replaces this one"
        if deployment.renews(hello) and self.streams.replace(name, hello.rank, reason):
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello, assembled)
        finally:
            self._follow(deployment)
        if deployment.group is not None and (group is None or deployment.group.forming != group.forming):
            self.observer.regrouped(name)
            self.streams.replace_all(
                name, "the group has formed again; this stream belonged to the previous group"
            )
        self.streams.add(name, hello.rank, stream)
        if deployment.plan is not None and deployment.plan.called_off:
            self.streams.call_off(name, CallOff(deployment.plan.plan_id), hello.rank)
        self.observer.heard(name, hello.rank)
        if deployment.outdated is not None:
            self.log.warning("outdated", deployment=name, reason=deployment.outdated)
        self.log.info("agent_connected", deployment=name, rank=hello.rank, node=hello.node, epoch=hello.epoch)
        return deployment

    def follow_up(self, deployment: Deployment) -> None:
        """Ask the connected ranks to report heat differently, if the required reporting has changed."""
        self.streams.ask(deployment.name, self.feed.reporting(deployment))

    def release(self, deployment: Deployment, rank: int, stream: RankStream) -> None:
        """Unregister a rank whose stream has ended, unless a newer stream has replaced it."""
        if not self.streams.remove(deployment.name, rank, stream):
            return
        deployment.leave(rank)
        self.log.info("agent_disconnected", deployment=deployment.name, rank=rank)

    def heat_report(
        self, deployment: Deployment, rank: int, report: HeatReport, message: agent_pb2.HeatReport
    ) -> None:
        """Add a rank's heat.

        Parameters
        ----------
        deployment
            Deployment of the rank.
        rank
            The rank.
        report
            The decoded report.
        message
            The same report, as received, for watchers.
        """
        name = deployment.name
        self.observer.heard(name, rank)
        steps = deployment.heat_report(rank, report)
        if self.feed.wants(deployment, report):
            self.feed.counted(name, rank, message)
        if any(steps):
            self._metrics.count("eplb_steps_received", name, by=steps.received)
            self._metrics.count("eplb_steps_lost", name, by=steps.lost)
        if steps.lost and deployment.heat is not None:
            slowest_rank, step = deployment.heat.pending.slowest
            self.log.info(
                "heat_lost", deployment=name, steps=steps.lost, slowest_rank=slowest_rank, reported_to=step
            )

    def assemble_steps(self, deployment: Deployment) -> bool:
        """Assemble a few complete steps and start a decision if one is due; return True if more are pending."""
        if deployment.heat is None or not deployment.heat.waiting:
            return False
        settling = deployment.session.settling
        steps_wait = deployment.assemble_steps(_STEPS_PER_TURN)
        if deployment.session.settling != settling:
            self.follow_up(deployment)
        self._decide(deployment)
        return steps_wait

    def heartbeat(self, deployment: Deployment, rank: int, heartbeat: Heartbeat) -> None:
        """Record a heartbeat from a rank."""
        self.observer.heard(deployment.name, rank)
        self.observer.count_calls(deployment.name, rank, heartbeat, self._metrics)
        deployment.heartbeat(rank, heartbeat)
        self._follow(deployment)

    def plan_status(self, deployment: Deployment, rank: int, status: PlanStatus) -> None:
        """Record a rank's progress with a plan."""
        self.observer.heard(deployment.name, rank)
        if status.state is PlanState.TRANSFERRED:
            self._metrics.observe("eplb_transfer_seconds", status.transfer_seconds, deployment.name)
        elif status.state is PlanState.COMMITTED:
            self._metrics.observe("eplb_commit_seconds", status.commit_seconds, deployment.name)
        plan = deployment.plan
        deployment.plan_status(rank, status, time.monotonic())
        self._follow(deployment)
        if plan is not None and deployment.plan is None:
            self._decide(deployment)

    # Operators

    def set_paused(self, deployment: Deployment, paused: bool) -> None:
        """Pause or resume planning."""
        deployment.set_paused(paused)
        self._known.remember(deployment)
        _log.info("paused" if paused else "resumed_planning", deployment=deployment.name)

    def lead(self, deployment: Deployment) -> bool:
        """Raise the deployment's leader term above all terms that its ranks have followed, so that they follow it.

        Return True if the term was raised, and False if the ranks follow this service already. Raises ``ConflictError``
        if there is no higher term.
        """
        if deployment.group is None or deployment.outdated is None:
            return False
        previous_term = deployment.leader_term
        term = higher_term(deployment.group.highest_term)
        deployment.lead_with(term)
        self._known.remember(deployment)
        _log.warning("leads", deployment=deployment.name, leader_term=term, before=previous_term)
        self.streams.end(deployment.name, "this service leads from now on; send a new Hello")
        return True

    async def store(self, done: str) -> None:
        """Wait until an operator's command is stored on disk; raises ``NotStoredError`` if that fails.

        The command takes effect in either case, because a pause may be urgent.

        Parameters
        ----------
        done
            Brief description of the command's effect, for the error message.
        """
        reason = await self._writer.settle()
        if reason:
            raise NotStoredError(
                f"{done}, but this is not stored, so a restart of the service would lose it: {reason}. The service "
                "keeps retrying; repeat the command to check if it has been stored"
            )

    async def history(self, name: str, limit: int) -> list[PastPlan]:
        """Return up to ``limit`` plans of a deployment, newest first; 0 means the maximum of 100."""
        count = min(limit or _MAX_PLANS_LISTED, _MAX_PLANS_LISTED)
        return await self._writer.run(self._writer.store.plans, name, count)

    def forget_departed(self, deployment: Deployment) -> None:
        """Remove a deployment at an operator's request; raises ``ConflictError`` if ranks are connected."""
        if deployment.connected:
            ranks = rank_list(sorted(member.rank for member in deployment.connected))
            raise ConflictError(
                f"{deployment.name!r} still has connections from {ranks}; stop the engines or the agents first"
            )
        self.forget(deployment.name)

    def forget(self, name: str) -> None:
        """Remove a deployment, its streams, metrics and stored state."""
        self.decider.drop(name)
        self.streams.replace_all(name, "the deployment was removed; send a new Hello")
        self._known.forget(name)
        self._metrics.forget(name)
        self.observer.forget(name)
        _log.info("deployment_forgotten", deployment=name)

    # Time

    def ticking(self, certificates: Mapping[str, Validity] | None = None) -> Iterator[None]:
        """Check deadlines and update the metrics; called about once per second.

        The iterator yields before each deployment, so that the event loop can run other tasks.

        Parameters
        ----------
        certificates
            Validity of the service's certificates, keyed by setting.
        """
        expiring = self._check_files(certificates or {})
        heat_bytes = sum(map(self._known.heat_bytes, self.deployments.values()))
        shown: list[GaugeValue] = [
            ("eplb_build_info", 1, __version__),
            ("eplb_leads", 1),
            ("eplb_leader_term", self.leader_term),
            ("eplb_deployments", len(self.deployments)),
            ("eplb_heat_memory_bytes", heat_bytes),
            ("eplb_store_failing", bool(self._writer.failing)),
        ]
        for setting, validity in (certificates or {}).items():
            shown.append(("eplb_certificate_expiry_seconds", validity.ends - time.time(), setting))
            shown.append(("eplb_certificate_expires_soon", setting in expiring, setting))
        for deployment in list(self.deployments.values()):
            yield
            try:
                shown += self._tick_deployment(deployment)
            except Exception:
                # A failure in one deployment must not affect the others.
                _log.exception("tick_failed", deployment=deployment.name)
        self._metrics.show(shown)

    def _tick_deployment(self, deployment: Deployment) -> list[GaugeValue]:
        """Check one deployment's deadlines and return its gauges, or none if it was removed in the meantime."""
        if self.deployments.get(deployment.name) is not deployment:
            return []
        deployment.tick(time.monotonic())
        self._follow(deployment)
        if self._known.has_expired(deployment):
            _log.info("deployment_expired", deployment=deployment.name)
            self.forget(deployment.name)
            return []
        self.follow_up(deployment)
        self._begin(deployment)
        self._decide(deployment)
        self.decider.evaluate(deployment)
        par = self.observer.tick(deployment)
        if par:
            self.streams.tell(deployment.name, Balance(par, recent_step_count(deployment)))
        return gauges(deployment, self.observer)

    def _decide(self, deployment: Deployment) -> None:
        """Start a decision if one is due, or a check of the plan in progress if it may be stale."""
        if deployment.may_call_off and self.decider.may_decide(deployment.name):
            self.decider.check(deployment)
        elif deployment.is_due(self.settings.decision_interval) and self.decider.may_decide(deployment.name):
            self.decider.start(deployment)

    def _begin(self, deployment: Deployment) -> None:
        """Once all ranks are connected, start making the first plan from the heat of the deployment's prior."""
        if not deployment.may_begin or not self.decider.may_decide(deployment.name):
            return
        try:
            prior = self._priors.of(deployment, self.deployments)
        except PriorError as error:
            _log.warning("prior_not_used", deployment=deployment.name, reason=str(error))
            deployment.begin_first_plan(f"no first plan was made: {error}")
            return
        if prior is not None:
            _log.info("begins_by_prior", deployment=deployment.name, source=prior[1])
            self.decider.start(deployment, prior)

    def _check_files(self, certificates: Mapping[str, Validity]) -> Set[str]:
        """Report problems of the store and of certificates to operators.

        Returns
        -------
        set of str
            Settings of the certificates that expire soon.
        """
        self._writer.retry()
        failing = self._writer.failing
        now = time.time()
        service_problems = list(self._writer.store.notices)
        if failing:
            service_problems.append(
                f"cannot write to the store, so a restart would lose the changes not yet written: {failing}"
            )
        expiring = {
            setting: validity for setting, validity in certificates.items() if validity.expires_soon(now)
        }
        for setting, validity in expiring.items():
            hours = (validity.ends - now) / 3600
            state = "has expired" if hours <= 0 else f"expires in {hours:.0f} hours"
            service_problems.append(
                f"a certificate in {setting} {state}: renew the file; the service reloads it without a restart"
            )
        for deployment in self.deployments.values():
            deployment.report_service_problems(service_problems)
        return expiring.keys()

    # Events

    def save_all(self) -> None:
        """Save all deployments before the service stops."""
        for deployment in self.deployments.values():
            if deployment.known or deployment.paused:
                self._known.remember(deployment)

    def _follow(self, deployment: Deployment) -> None:
        """Handle the events of a deployment."""
        for event in deployment.process_events():
            if isinstance(event, DeployedLayout):
                self._placement_known(deployment, event)
            elif isinstance(event, LayerCommitted):
                self._layer_committed(deployment, event)
            elif isinstance(event, PlanTracker):
                self._plan_ended(deployment, event)
            else:
                _log.warning("streams_outdated", deployment=deployment.name, reason=event.reason)
                self.streams.end(deployment.name, event.reason)

    def _placement_known(self, deployment: Deployment, live: DeployedLayout) -> None:
        store = self._writer.store
        name = deployment.name
        self._known.remember(deployment)
        if deployment.stored_initial_layout is not None:
            group_id, layout = deployment.stored_initial_layout
            if layout.placement is live.placement:
                self._writer.post(store.save_initial_layout, name, group_id, layout)
        self.feed.placed(deployment, live)
        _log.info("placement_known", deployment=name, epoch=live.epoch, digest=f"{live.digest:#x}")

    def _layer_committed(self, deployment: Deployment, event: LayerCommitted) -> None:
        name = deployment.name
        layer = event.update.layer
        moves = len(event.update.moves_M5)
        self.feed.switched(name, event)
        self._metrics.count("eplb_layers_switched", name)
        self._metrics.count("eplb_moves", name, by=moves)
        self._metrics.count("eplb_moved_bytes", name, by=event.bytes_moved)
        self._known.remember(deployment)
        _log.info("layer_committed", deployment=name, layer=layer, epoch=event.live.epoch, moves=moves)

    def _plan_ended(self, deployment: Deployment, plan: PlanTracker) -> None:
        assert plan.outcome is not None
        self.streams.withdraw(deployment.name)
        self._metrics.count("eplb_plans", deployment.name, plan.outcome.value)
        self._writer.post(
            self._writer.store.end_plan, plan.plan_id, plan.outcome, plan.reason, plan.committed
        )
        self._known.remember(deployment)
        _log.info("plan_ended", deployment=deployment.name, plan=plan.summary, committed=plan.committed)
