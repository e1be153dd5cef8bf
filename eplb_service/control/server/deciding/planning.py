"""Makes decisions: the pure planner on threads of its own, and the offer of what it decided."""

from __future__ import annotations

import asyncio
import math
import os
import time
from dataclasses import replace

import numpy as np
import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.membership import Group
from eplb_service.control.core.offer import Offer, rank_plans
from eplb_service.control.server.deciding.appraisals import Appraisals
from eplb_service.control.server.deciding.decision_outcome import DecisionOutcome
from eplb_service.control.server.deciding.planner_threads import PlannerThreads, outcome_of
from eplb_service.control.server.deciding.priors import Prior
from eplb_service.control.server.deciding.question import Question, answer
from eplb_service.control.server.observing.observer import Observer
from eplb_service.control.server.observing.worth_figures import priced_moves
from eplb_service.control.server.outgoing.streams import Streams
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.placement import mean_par
from eplb_service.planner.outlook import Outlook
from eplb_service.planner.plan import Plan
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.warmup import warm_up
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.shared_plan import SharedPlan

_AT_ONCE = max(2, os.cpu_count() or 1)
"""Decisions computed at a time: a slow one never delays another deployment's, and many share the cores by turns."""
_log = structlog.get_logger(__name__)


class Decider:
    """Decides for all deployments, each on a thread of its own and one decision at a time.

    Parameters
    ----------
    settings
        How to decide.
    deadline
        Seconds after which a decision is given up. Its thread cannot be stopped: the deployment waits until it has
        ended, while others are decided for on a new one.
    writer, streams, metrics, observer
        Where plans are remembered, sent, counted and kept to be looked at.

    ``appraisals`` judge what each decision's steps say of balancing's worth.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        deadline: float,
        writer: StoreWriter,
        streams: Streams,
        metrics: Metrics,
        observer: Observer,
    ) -> None:
        self._settings = settings
        self._deadline = deadline
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._writer = writer
        self._streams = streams
        self._metrics = metrics
        self._observer = observer
        self._threads = PlannerThreads()
        self._warm = asyncio.Event()
        self._running: dict[str, asyncio.Task[DecisionOutcome]] = {}
        self.appraisals = Appraisals(self._threads, self._turns, deadline, metrics)

    @property
    def computing(self) -> bool:
        """Whether a thread is at work; kernels cannot be interrupted."""
        return self._threads.busy

    async def warm_up(self) -> None:
        """Compile the kernels; decisions asked for before wait for it."""
        await outcome_of(self._threads.compute(warm_up, self._settings.threads))
        self._warm.set()

    def may_decide(self, name: str) -> bool:
        """Whether no thread is taken by decisions for this deployment, or too many others, that were given up."""
        return self._threads.may_begin(name)

    def start(self, deployment: Deployment, prior: Prior | None = None) -> asyncio.Task[DecisionOutcome]:
        """Decide now, on the ranks' own heat or on a prior's, or join the decision that is being made.

        Raises
        ------
        ConflictError
            Where the deployment is in no state for one.
        """
        running = self._running.get(deployment.name)
        if running is not None:
            return running
        obstacle = deployment.obstacle(needs_heat=prior is None)
        if obstacle is not None:
            raise ConflictError(f"no decision can be made for {deployment.name!r}: {obstacle}")
        if not self.may_decide(deployment.name):
            raise ConflictError(
                f"no decision can be made for {deployment.name!r}: one that was given up is still being computed"
            )
        if prior is None:
            deployment.deciding()
        else:
            deployment.beginning()
        task = asyncio.create_task(self._decide(deployment, prior))
        self._running[deployment.name] = task
        task.add_done_callback(lambda _: self._ended(deployment.name, task))
        return task

    def drop(self, name: str) -> None:
        """A deployment is gone: nobody waits for the decision that is being made for it."""
        self.appraisals.drop(name)
        running = self._running.pop(name, None)
        if running is not None:
            running.cancel()

    async def close(self) -> None:
        """Make no more decisions; one that is being computed is thrown away."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.appraisals.close()

    def _ended(self, name: str, task: asyncio.Task[DecisionOutcome]) -> None:
        if self._running.get(name) is task:
            del self._running[name]

    async def _decide(self, deployment: Deployment, prior: Prior | None) -> DecisionOutcome:
        await self._warm.wait()
        try:
            outcome = await self._decide_and_offer(deployment, prior)
        except Exception as error:
            _log.exception("decision_failed", deployment=deployment.name)
            outcome = DecisionOutcome("failed", f"the decision failed: {error}")
        self._metrics.plans.decisions.labels(deployment.name, outcome.result).inc()
        deployment.last_decision = outcome.message
        _log.info("decision", deployment=deployment.name, result=outcome.result, message=outcome.message)
        return outcome

    async def _decide_and_offer(self, deployment: Deployment, prior: Prior | None) -> DecisionOutcome:
        group, live = deployment.group, deployment.live
        if group is None or live is None:
            return DecisionOutcome("dropped", "no decision was made: the ranks went away")
        async with self._turns:
            question = Question.of(deployment, group, live, self._settings, prior)
            if question is None:
                return DecisionOutcome("dropped", "no decision was made: the ranks went away")
            computing = self._threads.compute(answer, question)
            try:
                solved, outlook, seconds = await asyncio.wait_for(outcome_of(computing), self._deadline)
            except asyncio.TimeoutError:
                # Its thread goes on by itself.
                self._threads.give_up(deployment.name, computing)
                return DecisionOutcome("failed", f"the decision was given up after {self._deadline:g} s")
        self._report(deployment.name, solved, outlook, seconds)
        deployment.priced(solved.price)
        if solved.price is not None:
            self._metrics.worth.report_price(deployment.name, priced_moves(solved.price))
        if prior is not None:
            outcome = await self._offered(deployment, group, live, solved, None)
            return replace(outcome, message=f"{outcome.message}, by the heat of {prior.source}")
        outcome = await self._offered(deployment, group, live, solved, outlook)
        self.appraisals.begin(deployment, group, question, solved)
        return outcome

    async def _offered(
        self,
        deployment: Deployment,
        group: Group,
        live: LivePlacement,
        solved: Plan,
        outlook: Outlook | None,
    ) -> DecisionOutcome:
        """Offer what was decided for a group that served ``live``; ``outlook`` is ``None`` for what a prior says."""
        if not solved.layers:
            if outlook is not None:
                deployment.decided(outlook, changed=False)
            seen = "no tokens" if math.isnan(solved.par_seen) else f"PAR {solved.par_seen:.3f}"
            why = ": experts are bound to their ranks" if group.shape.rank_bound else ""
            return DecisionOutcome("kept", f"every layer kept ({seen}){why}{_won(outlook)}")
        store, term = self._writer.store, deployment.leader_term
        computing = self._threads.compute(_encoded, store.new_plan_id(), live, solved, term)
        offer, encoded = await outcome_of(computing)
        now = deployment.group
        changed = now is None or now.forming != group.forming or deployment.live is not live
        obstacle = deployment.obstacle(needs_heat=outlook is not None)
        obstacle = "the ranks changed meanwhile" if changed else obstacle
        if obstacle is not None:
            return DecisionOutcome("dropped", f"a plan was made but not offered: {obstacle}")
        if outlook is not None:
            deployment.decided(outlook, changed=True)
        deployment.offer(offer, time.monotonic())
        self._observer.offered(deployment.name, offer.plan_id)
        await self._writer.write(store.begin_plan, deployment.name, offer, term)
        if deployment.plan is None or deployment.plan.offer is not offer:
            return DecisionOutcome("dropped", "a plan was made, but the ranks changed before it was sent")
        self._streams.send(deployment.name, encoded)
        message = (
            f"plan {offer.plan_id}: {len(solved.layers)} layers, {solved.moves} moves, "
            f"PAR {solved.par_seen:.3f} -> {solved.par_planned:.3f}{_won(outlook)}"
        )
        return DecisionOutcome("plan", message, offer.plan_id, len(solved.layers), solved.moves)

    def _report(self, name: str, solved: Plan, outlook: Outlook, seconds: float) -> None:
        self._metrics.plans.solve_seconds.labels(name).observe(seconds)
        self._observer.decided(name, solved, seconds)
        for verdict in solved.verdicts:
            if not math.isnan(verdict.noise_floor):
                self._metrics.balance.noise_floor.labels(name, str(verdict.layer)).set(verdict.noise_floor)
        if not math.isnan(solved.par_seen):
            floor_L = np.array([verdict.noise_floor for verdict in solved.verdicts])
            self._metrics.balance.deployment_noise_floor.labels(name).set(float(mean_par(floor_L)))
            self._metrics.balance.deployment_par_seen.labels(name).set(solved.par_seen)
            self._metrics.balance.deployment_par_planned.labels(name).set(solved.par_planned)
        if outlook.won is not None and outlook.won.known:
            self._metrics.balance.won(name, outlook.won.mean, outlook.won.low, outlook.won.high)


def _won(outlook: Outlook | None) -> str:
    """What balancing has won so far, for operators; empty where that is not known."""
    won = None if outlook is None else outlook.won
    if won is None or not won.known:
        return ""
    return f"; {won.mean:.3f} won over the first layout (95 %: {won.low:.3f} to {won.high:.3f})"


def _encoded(plan_id: int, live: LivePlacement, solved: Plan, leader_term: int) -> tuple[Offer, SharedPlan]:
    offer = Offer.of(plan_id, live, solved)
    (plan,) = rank_plans(offer, leader_term, 1)
    return offer, SharedPlan.of(plan, [milestone.update.log2phy_RE for milestone in offer.milestones])
