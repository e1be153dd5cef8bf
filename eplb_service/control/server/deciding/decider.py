"""Run decisions on planner threads and offer the resulting plans to the ranks."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from eplb_core.planner.counterfactual import Served
from eplb_core.planner.decision import check, decide, evaluate_gain, price_time
from eplb_core.planner.engine_decision import place_for_engine
from eplb_core.planner.plan import Outlook, Plan
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.solver.warmup import warm_up
from eplb_core.wire.agent import CallOff
from eplb_core.wire.engine import DecideRequest
from eplb_core.wire.fields import WireError
from eplb_core.wire.plan import SharedPlan
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError, ExhaustedError
from eplb_service.control.core.group import Group
from eplb_service.control.core.health import recent_step_count
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.control.server.deciding.priors import Prior
from eplb_service.control.server.deciding.snapshot import Snapshot
from eplb_service.control.server.observer import Observer
from eplb_service.control.server.outgoing.streams import Streams
from eplb_service.control.server.store import StoreWriter
from eplb_service.telemetry.metrics import Metrics

DECISION_RESULTS = ("plan", "kept", "dropped", "failed")
"""Results of a decision.

``plan``: a plan was offered. ``kept``: no layer changes. ``dropped``: no plan was offered, because the ranks changed.
``failed``: the decision raised an error or timed out.
"""
_MAX_CONCURRENT = max(2, os.cpu_count() or 1)
"""Maximum number of concurrent decisions. It is at least two, so that a slow decision does not delay another
deployment."""
_MAX_STUCK = 4
"""Maximum number of timed-out decisions that still occupy a thread. Once it is reached, no further decisions are
made."""
_EVALUATION_REST = 20.0
"""Interval between evaluations of the gain, as a multiple of the time that one takes."""
_NICENESS = 5
"""Niceness of planner threads. They get a third of an engine thread's CPU share, which is enough to release Python's
global interpreter lock promptly."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _DecisionOutcome:
    """Outcome of one decision.

    Parameters
    ----------
    result
        One of ``DECISION_RESULTS``.
    message
        Description for operators.
    plan_id
        Id of the offered plan; 0 without a plan.
    layers
        Number of layers that the plan changes.
    moves
        Number of moves in the plan.
    """

    result: str
    message: str
    plan_id: int = 0
    layers: int = 0
    moves: int = 0


class Decider:
    """Makes the decisions for all deployments, each on its own thread and at most one per deployment at a time.

    Besides decisions, it runs two kinds of background work:

    - An *appraisal* estimates the time price of tokens from the steps of a decision, after its plan has been sent. A
      new appraisal of a deployment cancels the previous one.
    - An *evaluation* compares the newest steps with the initial layout, to show the gain from balancing. It is repeated
      every second, or less often if it is slow.

    Parameters
    ----------
    settings
        Settings of the planner.
    deadline
        Seconds after which a decision times out. Its thread cannot be stopped, so no further decision is made for the
        deployment until the thread has ended.
    writer
        Writer of the store, for new plans.
    streams
        Streams to the ranks, to send plans.
    metrics
        Counters of decisions.
    observer
        Record of decisions, for charts.
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
        self._writer = writer
        self._streams = streams
        self._metrics = metrics
        self._observer = observer
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT)
        self._warm = asyncio.Event()
        self._running: dict[str, asyncio.Task[_DecisionOutcome]] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._computing: set[Future[Any]] = set()
        self._stuck: dict[str, Future[Any]] = {}
        self._appraising: dict[str, asyncio.Task[None]] = {}
        self._evaluating: dict[str, asyncio.Task[None]] = {}
        self._evaluate_at: dict[str, float] = {}

    @property
    def computing(self) -> bool:
        """True while any planner thread is running. Planner threads cannot be interrupted while they run kernels."""
        return any(not computing.done() for computing in self._computing)

    async def warm_up(self) -> None:
        """Compile the kernels. Decisions that start earlier wait until the kernels are compiled."""
        await _result_of(self._compute(warm_up, self._settings.threads))
        self._warm.set()

    def may_decide(self, name: str) -> bool:
        """Return False while timed-out decisions for this deployment, or too many for others, still occupy threads."""
        self._stuck = {stuck: computing for stuck, computing in self._stuck.items() if not computing.done()}
        return name not in self._stuck and len(self._stuck) < _MAX_STUCK

    def start(self, deployment: Deployment, prior: Prior | None = None) -> asyncio.Task[_DecisionOutcome]:
        """Start a decision and return its task, or return the task of the decision in progress.

        Raises ``ConflictError`` if the deployment's state allows no decision.

        Parameters
        ----------
        deployment
            The deployment.
        prior
            Prior on which to base the decision; ``None`` to use the deployment's own heat.
        """
        name = deployment.name
        running = self._running.get(name)
        if running is not None and not running.done():
            return running
        obstacle = deployment.obstacle(needs_heat=prior is None)
        if obstacle is None and not self.may_decide(name):
            obstacle = "a decision that timed out is still being computed"
        if obstacle is not None:
            raise ConflictError(f"no decision can be made for {name!r}: {obstacle}")
        if prior is None:
            deployment.begin_decision()
        else:
            deployment.begin_first_plan()
        self._running[name] = asyncio.create_task(self._decide(deployment, prior))
        return self._running[name]

    async def place_for_engine(self, request: DecideRequest) -> npt.NDArray[np.int64]:
        """Return a placement for an engine that moves the weights itself, int64 ``[L, P]``.

        Raises ``WireError`` if the request is inconsistent, and ``ExhaustedError`` if the decision takes too long.
        """
        await self._warm.wait()
        name = f"engine of {request.deployment}"
        if not self.may_decide(name):
            raise ExhaustedError("a decision that timed out is still being computed; retry later")
        async with self._turns:
            try:
                placement = await self._compute_in_time(name, _place_for_engine, request, self._settings)
            except ValueError as error:
                raise WireError(f"decide: {error}") from error
            except asyncio.TimeoutError:
                raise ExhaustedError(f"the decision timed out after {self._deadline:g} s") from None
        _log.info("engine_decision", deployment=request.deployment, layers=len(placement))
        return placement

    def drop(self, name: str) -> None:
        """Cancel all work for a deployment."""
        self._evaluate_at.pop(name, None)
        for tasks in (self._running, self._checking, self._appraising, self._evaluating):
            if name in tasks:
                tasks.pop(name).cancel()

    async def close(self) -> None:
        """Cancel all work. The results of running threads are discarded."""
        tasks: list[asyncio.Task[Any]] = [
            *self._running.values(),
            *self._checking.values(),
            *self._appraising.values(),
            *self._evaluating.values(),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _compute(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        computing = _on_thread(function, *arguments)
        self._computing = {running for running in self._computing if not running.done()} | {computing}
        return computing

    async def _compute_in_time(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on a planner thread; raises ``TimeoutError`` after the deadline. The thread keeps running."""
        computing = self._compute(function, *arguments)
        try:
            return await asyncio.wait_for(_result_of(computing), self._deadline)
        except asyncio.TimeoutError:
            self._stuck[name] = computing
            raise

    async def _decide(self, deployment: Deployment, prior: Prior | None) -> _DecisionOutcome:
        await self._warm.wait()
        try:
            outcome = await self._decide_and_offer(deployment, prior)
        except Exception as error:
            _log.exception("decision_failed", deployment=deployment.name)
            outcome = _DecisionOutcome("failed", f"the decision failed: {error}")
        self._metrics.count("eplb_decisions", deployment.name, outcome.result)
        deployment.record_last_decision(outcome.message)
        _log.info("decision", deployment=deployment.name, result=outcome.result, message=outcome.message)
        return outcome

    async def _decide_and_offer(self, deployment: Deployment, prior: Prior | None) -> _DecisionOutcome:
        initial_group = deployment.group
        async with self._turns:
            group = deployment.group
            snapshot = Snapshot.of(deployment, self._settings, prior)
            if (
                snapshot is None
                or group is None
                or initial_group is None
                or group.forming != initial_group.forming
            ):
                return _DecisionOutcome("dropped", "no decision was made: the ranks have disconnected")
            try:
                decision = await self._compute_in_time(deployment.name, snapshot.compute, decide)
            except asyncio.TimeoutError:
                return _DecisionOutcome("failed", f"the decision timed out after {self._deadline:g} s")
        solved, outlook = decision.result
        if outlook.too_recent:
            deployment.record_decision(outlook, decision.cost, changed=False)
            return _DecisionOutcome(
                "kept", "heat has just changed; the next decision uses the steps since then"
            )
        self._metrics.observe("eplb_solve_seconds", decision.seconds, deployment.name)
        self._observer.decided(deployment.name, solved, decision.seconds)
        if solved.price is not None:
            deployment.record_move_price(solved.price)
        if prior is not None:
            outcome = await self._offer(deployment, group, solved)
            return replace(outcome, message=f"{outcome.message}, based on the heat of {prior[1]}")
        outcome = await self._offer(deployment, group, solved, outlook, decision.cost)
        if deployment.session.time_price_is_due:
            if deployment.name in self._appraising:
                self._appraising[deployment.name].cancel()
            task = asyncio.create_task(self._appraise(deployment, group, snapshot))
            self._appraising[deployment.name] = task
        return outcome

    async def _offer(
        self,
        deployment: Deployment,
        group: Group,
        solved: Plan,
        outlook: Outlook | None = None,
        cost: float = 0.0,
    ) -> _DecisionOutcome:
        """Offer a decision to the ranks, unless they have changed since.

        Parameters
        ----------
        deployment
            The deployment.
        group
            Group for which the decision was made.
        solved
            The plan.
        outlook
            Outlook of the decision; ``None`` if the decision was based on a prior.
        cost
            CPU time of the decision, expressed as the number of steps whose CPU budget pays for it.
        """
        if not solved.layers:
            if outlook is not None:
                deployment.record_decision(outlook, cost, changed=False)
            par = "no tokens" if math.isnan(solved.par_seen) else f"PAR {solved.par_seen:.3f}"
            reason = ": experts are bound to their ranks" if group.shape.rank_bound else ""
            return _DecisionOutcome("kept", f"every layer kept ({par}){reason}")
        store = self._writer.store
        term = deployment.leader_term
        live = group.live
        computing = self._compute(_encode_plan, store.new_plan_id(), group.topology, live, solved, term)
        plan, encoded = await _result_of(computing)
        current = deployment.group
        obstacle = deployment.obstacle(needs_heat=outlook is not None)
        if current is None or current.forming != group.forming or current.live is not live:
            obstacle = "the ranks changed in the meantime"
        if obstacle is not None:
            return _DecisionOutcome("dropped", f"a plan was made but not offered: {obstacle}")
        if outlook is not None:
            deployment.record_decision(outlook, cost, changed=True)
        deployment.offer(plan, time.monotonic())
        self._observer.offered(deployment.name, plan.plan_id)
        await self._writer.write(store.begin_plan, deployment.name, plan, term, time.time())
        if deployment.plan is None or deployment.plan.plan_id != plan.plan_id or deployment.plan.called_off:
            return _DecisionOutcome("dropped", "the plan was outdated before it was sent")
        self._streams.send(deployment.name, encoded)
        message = (
            f"plan {plan.plan_id}: {len(solved.layers)} of {group.shape.layers} layers, {solved.moves} moves, "
            f"PAR {solved.par_seen:.3f} -> {solved.par_planned:.3f}"
        )
        return _DecisionOutcome("plan", message, plan.plan_id, len(solved.layers), solved.moves)

    async def _appraise(self, deployment: Deployment, group: Group, snapshot: Snapshot) -> None:
        """Estimate the time price once the plan has been sent, so that the ranks receive the plan without delay."""
        await self._streams.sent(deployment.name)
        async with self._turns:
            try:
                appraisal = await self._compute_in_time(deployment.name, snapshot.compute, price_time)
            except asyncio.TimeoutError:
                return
            except Exception:
                _log.exception("time_price_unknown", deployment=deployment.name)
                return
        current = deployment.group
        price = appraisal.result
        if price is not None and current is not None and current.forming == group.forming:
            deployment.record_time_price(price, appraisal.cost)

    def check(self, deployment: Deployment) -> None:
        """Start checking whether heat has changed since the plan in progress was decided.

        If heat has changed, the plan is called off on all ranks. The next decision is due once they have answered.
        """
        running = self._checking.get(deployment.name)
        if running is None or running.done():
            deployment.begin_check()
            self._checking[deployment.name] = asyncio.create_task(self._check(deployment))

    async def _check(self, deployment: Deployment) -> None:
        name = deployment.name
        plan = deployment.plan
        snapshot = Snapshot.of(deployment, self._settings)
        if plan is None or snapshot is None:
            return
        try:
            checked = await self._compute_in_time(name, snapshot.compute, check)
        except asyncio.TimeoutError:
            return
        except Exception:
            _log.exception("change_unknown", deployment=name)
            return
        if deployment.record_check(checked.result, plan.plan_id, time.monotonic()):
            self._streams.call_off(name, CallOff(plan.plan_id))
            _log.info("plan_called_off", deployment=name, plan=plan.plan_id)

    def evaluate(self, deployment: Deployment) -> None:
        """Start evaluating the gain over the newest steps, unless an evaluation is in progress or ran very recently."""
        name = deployment.name
        running = self._evaluating.get(name)
        if running is not None and not running.done():
            return
        if not recent_step_count(deployment) or time.monotonic() < self._evaluate_at.get(name, 0.0):
            return
        if self._warm.is_set() and self.may_decide(name):
            self._evaluating[name] = asyncio.create_task(self._evaluate(deployment))

    async def _evaluate(self, deployment: Deployment) -> None:
        group = deployment.group
        heat = deployment.heat
        snapshot = Snapshot.of(deployment, self._settings)
        if group is None or heat is None or snapshot is None or snapshot.initial is None:
            return
        newest = recent_step_count(deployment)
        snapshot = replace(snapshot, heat=replace(snapshot.heat, rows=snapshot.heat.rows[-newest:]))
        effects = deployment.switch_log.effects()
        slowest_T = heat.served_steps(newest).slowest_T
        served = Served(heat.served_par(newest), slowest_T, heat.served_times(newest), effects)
        began = time.monotonic()
        try:
            worth = await self._compute_in_time(
                deployment.name, lambda: evaluate_gain(snapshot.inputs, served)
            )
        except asyncio.TimeoutError:
            return
        except Exception:
            _log.exception("gain_unknown", deployment=deployment.name)
            worth = None
        duration = time.monotonic() - began
        self._evaluate_at[deployment.name] = began + _EVALUATION_REST * duration
        current = deployment.group
        if current is not None and current.forming == group.forming and deployment.connected:
            deployment.record_worth(worth)


def _on_thread(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call a function on a new thread, which ends when the function returns."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-planner", initializer=_lower_priority)
    computing = thread.submit(function, *arguments)
    thread.shutdown(wait=False)
    return computing


def _lower_priority() -> None:
    """Lower this thread's priority in favour of an engine on the same cores. The solver's threads inherit it."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS))


async def _result_of(computing: Future[T]) -> T:
    """Return the result. If the caller is cancelled, the computation continues."""
    return await asyncio.shield(asyncio.wrap_future(computing))


def _encode_plan(
    plan_id: int, topology: Topology, live: DeployedLayout, solved: Plan, leader_term: int
) -> tuple[PlanTracker, SharedPlan]:
    plan = PlanTracker.of(plan_id, live, solved)
    tables = [update.log2phy_RE for update in solved.layers]
    groups = topology.token_groups_R.tolist()
    return plan, SharedPlan(plan.rank_plan(leader_term, 0, groups), tables)


def _place_for_engine(request: DecideRequest, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Place the experts with the service's settings, but with the engine's split."""
    settings = replace(settings, split=request.split, fitted_curve=False)
    if request.sum_only:
        settings = replace(settings, move_price=0.0)
    return place_for_engine(request.heat_NLE, request.phy2log_LP, request.ranks, request.nodes, settings)
