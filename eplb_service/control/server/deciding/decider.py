"""Decisions: made by the pure planner on threads of its own, then offered to the ranks and appraised."""

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

import structlog

from eplb_core.planner.counterfactual import Served
from eplb_core.planner.plan import Outlook, Plan
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.solver.warmup import warm_up
from eplb_core.wire.agent import CallOff
from eplb_core.wire.plan import SharedPlan
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.group import Group
from eplb_service.control.core.health import served_now
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.control.server.deciding.computing import (
    DecisionInputs,
    Prior,
    appraise,
    decide,
    judge,
    weigh,
)
from eplb_service.control.server.observer import Observer
from eplb_service.control.server.outgoing.streams import Streams
from eplb_service.control.server.store import StoreWriter
from eplb_service.telemetry.metrics import Metrics

DECISION_RESULTS = ("plan", "kept", "dropped", "failed")
"""A plan was offered, every layer was kept, a plan was dropped before it was offered, or the decision failed."""
_AT_ONCE = max(2, os.cpu_count() or 1)
"""Decisions computed at a time: a slow one never delays another deployment's, and many share the cores by turns."""
_MAX_STUCK = 4
"""Decisions that were given up and still take a thread each; beyond, no more are made."""
_JUDGE_REST = 20.0
"""Times as long as it takes to judge the newest steps pass until that begins again."""
_NICENESS = 5
"""Of threads that decide: a third of the share of an engine's, yet enough to give the interpreter's lock back soon."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _DecisionOutcome:
    """Outcome of one decision: one of ``DECISION_RESULTS``, the same for operators, and the plan that was offered."""

    result: str
    message: str
    plan_id: int = 0
    layers: int = 0
    moves: int = 0


class Decider:
    """Decides for all deployments, each on a thread of its own and one decision at a time.

    After some decisions their steps are asked what tokens cost in time; nobody waits for that appraisal, which ends the
    one before. Besides, the newest steps are judged beside the layout that the ranks came with, every second or so.

    Parameters
    ----------
    settings
        Of the planner.
    deadline
        Seconds after which a decision is given up. Its thread cannot be stopped: the deployment waits until it has
        ended, while others are decided for on a new one.
    writer, streams, metrics, observer
        Where plans are remembered, sent, counted and kept to be looked at.
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
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._warm = asyncio.Event()
        self._running: dict[str, asyncio.Task[_DecisionOutcome]] = {}
        self._weighing: dict[str, asyncio.Task[None]] = {}
        self._computing: set[Future[Any]] = set()
        self._stuck: dict[str, Future[Any]] = {}
        self._appraising: dict[str, asyncio.Task[None]] = {}
        self._judging: dict[str, asyncio.Task[None]] = {}
        self._judge_at: dict[str, float] = {}

    @property
    def computing(self) -> bool:
        """True while a thread is at work; kernels cannot be interrupted."""
        return any(not one.done() for one in self._computing)

    async def warm_up(self) -> None:
        """Compile the kernels; decisions asked for before wait for it."""
        await _result_of(self._compute(warm_up, self._settings.threads))
        self._warm.set()

    def may_decide(self, name: str) -> bool:
        """Return whether no thread is taken by given-up decisions for this deployment, or too many others."""
        self._stuck = {stuck: computing for stuck, computing in self._stuck.items() if not computing.done()}
        return name not in self._stuck and len(self._stuck) < _MAX_STUCK

    def start(self, deployment: Deployment, prior: Prior | None = None) -> asyncio.Task[_DecisionOutcome]:
        """Decide now, on the ranks' own heat or on a prior's, or join the decision that is being made.

        Raises ``ConflictError`` where the deployment is in no state for one.
        """
        name = deployment.name
        running = self._running.get(name)
        if running is not None and not running.done():
            return running
        obstacle = deployment.obstacle(needs_heat=prior is None)
        if obstacle is None and not self.may_decide(name):
            obstacle = "one that was given up is still being computed"
        if obstacle is not None:
            raise ConflictError(f"no decision can be made for {name!r}: {obstacle}")
        if prior is None:
            deployment.deciding()
        else:
            deployment.beginning()
        self._running[name] = asyncio.create_task(self._decide(deployment, prior))
        return self._running[name]

    def drop(self, name: str) -> None:
        """Forget a deployment: nobody waits for the decision that is being made for it."""
        self._judge_at.pop(name, None)
        for tasks in (self._running, self._weighing, self._appraising, self._judging):
            if name in tasks:
                tasks.pop(name).cancel()

    async def close(self) -> None:
        """Make no more decisions; one that is being computed is thrown away."""
        tasks: list[asyncio.Task[Any]] = [
            *self._running.values(),
            *self._weighing.values(),
            *self._appraising.values(),
            *self._judging.values(),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _compute(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        computing = _on_thread(function, *arguments)
        self._computing = {one for one in self._computing if not one.done()} | {computing}
        return computing

    async def _in_time(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Compute for a deployment; raises ``TimeoutError`` past the deadline, when its thread goes on by itself."""
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
        asked_for = deployment.group
        async with self._turns:
            group, inputs = deployment.group, DecisionInputs.of(deployment, self._settings, prior)
            if inputs is None or group is None or asked_for is None or group.forming != asked_for.forming:
                return _DecisionOutcome("dropped", "no decision was made: the ranks went away")
            try:
                solved, outlook, seconds = await self._in_time(deployment.name, decide, inputs)
            except asyncio.TimeoutError:
                return _DecisionOutcome("failed", f"the decision was given up after {self._deadline:g} s")
        if outlook.too_recent:
            deployment.decided(outlook, changed=False)
            return _DecisionOutcome("kept", "heat has just changed; the next decision uses the steps since")
        self._metrics.observe("eplb_solve_seconds", seconds, deployment.name)
        self._observer.decided(deployment.name, solved, seconds)
        if solved.price is not None:
            deployment.record_move_price(solved.price)
        if prior is not None:
            outcome = await self._offered(deployment, group, solved, None)
            return replace(outcome, message=f"{outcome.message}, by the heat of {prior[1]}")
        outcome = await self._offered(deployment, group, solved, outlook)
        if deployment.decisions.to_appraise:
            if deployment.name in self._appraising:
                self._appraising[deployment.name].cancel()
            task = asyncio.create_task(self._appraise(deployment, group, inputs))
            self._appraising[deployment.name] = task
        return outcome

    async def _offered(
        self, deployment: Deployment, group: Group, solved: Plan, outlook: Outlook | None
    ) -> _DecisionOutcome:
        """Offer what was decided for ``group`` as it was; ``outlook`` is ``None`` for what a prior says."""
        if not solved.layers:
            if outlook is not None:
                deployment.decided(outlook, changed=False)
            seen = "no tokens" if math.isnan(solved.par_seen) else f"PAR {solved.par_seen:.3f}"
            why = ": experts are bound to their ranks" if group.shape.rank_bound else ""
            return _DecisionOutcome("kept", f"every layer kept ({seen}){why}")
        store, term, live = self._writer.store, deployment.leader_term, group.live
        computing = self._compute(_encoded, store.new_plan_id(), group.topology, live, solved, term)
        plan, encoded = await _result_of(computing)
        now = deployment.group
        changed = now is None or now.forming != group.forming or now.live is not live
        obstacle = deployment.obstacle(needs_heat=outlook is not None)
        obstacle = "the ranks changed meanwhile" if changed else obstacle
        if obstacle is not None:
            return _DecisionOutcome("dropped", f"a plan was made but not offered: {obstacle}")
        if outlook is not None:
            deployment.decided(outlook, changed=True)
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

    async def _appraise(self, deployment: Deployment, group: Group, inputs: DecisionInputs) -> None:
        """Price time, once the ranks have the plan: that is what they wait for."""
        await self._streams.sent(deployment.name)
        async with self._turns:
            try:
                found = await self._in_time(deployment.name, appraise, inputs)
            except asyncio.TimeoutError:
                return
            except Exception:
                _log.exception("time_price_unknown", deployment=deployment.name)
                return
        now = deployment.group
        if found is not None and now is not None and now.forming == group.forming:
            deployment.record_time_price(*found)

    def weigh(self, deployment: Deployment) -> None:
        """Check in the background if heat has changed since the plan under way was decided on.

        If so, call the plan off at all ranks. The next decision is due once they have answered.
        """
        running = self._weighing.get(deployment.name)
        if running is None or running.done():
            deployment.weighing()
            self._weighing[deployment.name] = asyncio.create_task(self._weigh(deployment))

    async def _weigh(self, deployment: Deployment) -> None:
        name = deployment.name
        plan = deployment.plan
        inputs = DecisionInputs.of(deployment, self._settings)
        if plan is None or inputs is None:
            return
        try:
            outlook = await self._in_time(name, weigh, inputs)
        except asyncio.TimeoutError:
            return
        except Exception:
            _log.exception("change_unknown", deployment=name)
            return
        if deployment.weighed(outlook, plan.plan_id, time.monotonic()):
            self._streams.call_off(name, CallOff(plan.plan_id))
            _log.info("plan_called_off", deployment=name, plan=plan.plan_id)

    def judge(self, deployment: Deployment) -> None:
        """Begin to judge the newest steps, unless that is under way or was done lately. Nobody waits for it."""
        name = deployment.name
        running = self._judging.get(name)
        if running is not None and not running.done():
            return
        if not served_now(deployment) or time.monotonic() < self._judge_at.get(name, 0.0):
            return
        if self._warm.is_set() and self.may_decide(name):
            self._judging[name] = asyncio.create_task(self._judge(deployment))

    async def _judge(self, deployment: Deployment) -> None:
        group = deployment.group
        heat = deployment.heat
        inputs = DecisionInputs.of(deployment, self._settings)
        if group is None or heat is None or inputs is None or inputs.found is None:
            return
        newest = served_now(deployment)
        inputs = replace(inputs, heat=replace(inputs.heat, rows=inputs.heat.rows[-newest:]))
        effects = deployment.switch_log.effects()
        slowest_T = heat.served_steps(newest).slowest_T
        served = Served(heat.served_par(newest), slowest_T, heat.served_times(newest), effects)
        began = time.monotonic()
        try:
            worth = await self._in_time(deployment.name, judge, inputs, served)
        except asyncio.TimeoutError:
            return
        except Exception:
            _log.exception("gain_unknown", deployment=deployment.name)
            worth = None
        taken = time.monotonic() - began
        self._judge_at[deployment.name] = began + _JUDGE_REST * taken
        now = deployment.group
        if now is not None and now.forming == group.forming and deployment.connected:
            deployment.record_worth(worth)


def _on_thread(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Compute on a thread of its own, which ends with it."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-planner", initializer=_give_way)
    computing = thread.submit(function, *arguments)
    thread.shutdown(wait=False)
    return computing


def _give_way() -> None:
    """Let an engine on the same cores go first; the solver's threads inherit what this one has."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS))


async def _result_of(computing: Future[T]) -> T:
    """Wait for it; who stops waiting does not stop it."""
    return await asyncio.shield(asyncio.wrap_future(computing))


def _encoded(
    plan_id: int, topology: Topology, live: DeployedLayout, solved: Plan, leader_term: int
) -> tuple[PlanTracker, SharedPlan]:
    plan = PlanTracker.of(plan_id, live, solved)
    tables = [update.log2phy_RE for update in solved.layers]
    groups = topology.token_groups_R.tolist()
    return plan, SharedPlan(plan.rank_plan(leader_term, 0, groups), tables)
