"""Makes decisions: the pure planner on a thread of its own, and the offer of what it decided."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from eplb_service.control.deployment import Deployment
from eplb_service.control.live import LivePlacement
from eplb_service.control.plan_life import Offer
from eplb_service.control.refusal import contradicts
from eplb_service.control.store_writer import StoreWriter
from eplb_service.control.streams import Streams
from eplb_service.control.wire_plans import wire_plans
from eplb_service.heat.gather import HeatSnapshot
from eplb_service.planner.decide import plan
from eplb_service.planner.plan import Plan
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.warmup import warm_up
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Decision:
    """What came of one decision; ``plan_id`` is 0 where nothing was offered."""

    plan_id: int
    layers: int
    moves: int
    words: str


class Decider:
    """Decides for all deployments, one decision at a time.

    Parameters
    ----------
    settings
        How to decide.
    writer, streams, metrics
        Where plans are remembered, sent and counted.
    """

    def __init__(
        self, settings: PlannerSettings, writer: StoreWriter, streams: Streams, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._streams = streams
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-planner")
        self._warm = asyncio.Event()
        self._running: dict[str, asyncio.Task[Decision]] = {}

    async def warm_up(self) -> None:
        """Compile the kernels; decisions asked for before wait for it."""
        await asyncio.get_running_loop().run_in_executor(self._thread, warm_up, self._settings.threads)
        self._warm.set()

    def start(self, deployment: Deployment) -> asyncio.Task[Decision]:
        """Decide now, or join the decision that is being made.

        Raises ``RefusedError`` where the deployment is in no state for one.
        """
        running = self._running.get(deployment.name)
        if running is not None:
            return running
        obstacle = deployment.obstacle()
        if obstacle is not None:
            raise contradicts(f"no decision can be made for {deployment.name!r}: {obstacle}")
        deployment.deciding()
        task = asyncio.create_task(self._decide(deployment))
        self._running[deployment.name] = task
        task.add_done_callback(lambda _: self._running.pop(deployment.name, None))
        return task

    async def close(self) -> None:
        """Make no more decisions; one that is being computed is thrown away."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _decide(self, deployment: Deployment) -> Decision:
        await self._warm.wait()
        try:
            result, decision = await self._decide_and_offer(deployment)
        except Exception as error:
            _log.exception("decision_failed", deployment=deployment.name)
            result, decision = "failed", Decision(0, 0, 0, f"the decision failed: {error}")
        self._metrics.decisions.labels(deployment.name, result).inc()
        deployment.last_decision = decision.words
        _log.info("decision", deployment=deployment.name, result=result, words=decision.words)
        return decision

    async def _decide_and_offer(self, deployment: Deployment) -> tuple[str, Decision]:
        group, live, heat = deployment.group, deployment.live, deployment.heat
        if group is None or live is None or heat is None:
            return "dropped", Decision(0, 0, 0, "no decision was made: the ranks went away")
        compute = asyncio.get_running_loop().run_in_executor
        solved, seconds = await compute(
            self._thread, _solve, heat.snapshot(), live, group.topology, self._settings
        )
        self._tell(deployment.name, solved, seconds)
        if not solved.layers:
            return "kept", Decision(0, 0, 0, f"every layer kept (PAR {solved.par_seen:.3f})")
        store = self._writer.store
        offer = Offer.of(store.new_plan_id(), live, solved)
        messages = await compute(self._thread, wire_plans, offer, store.leader_term, group.shape.ranks)
        changed = deployment.group is not group or deployment.live is not live
        obstacle = "the ranks changed meanwhile" if changed else deployment.obstacle()
        if obstacle is not None:
            return "dropped", Decision(0, 0, 0, f"a plan was made but not offered: {obstacle}")
        deployment.offer(offer, time.monotonic())
        await self._writer.write(store.begin_plan, deployment.name, offer)
        if deployment.plan is None or deployment.plan.offer is not offer:
            return "dropped", Decision(0, 0, 0, "a plan was made, but the ranks changed before it was sent")
        self._streams.send(deployment.name, messages)
        words = (
            f"plan {offer.plan_id}: {len(solved.layers)} layers, {solved.moves} moves, "
            f"PAR {solved.par_seen:.3f} -> {solved.par_planned:.3f}"
        )
        return "plan", Decision(offer.plan_id, len(solved.layers), solved.moves, words)

    def _tell(self, name: str, solved: Plan, seconds: float) -> None:
        self._metrics.solve_seconds.labels(name).observe(seconds)
        self._metrics.deployment_par_seen.labels(name).set(solved.par_seen)
        self._metrics.deployment_par_planned.labels(name).set(solved.par_planned)


def _solve(
    snapshot: HeatSnapshot, live: LivePlacement, topology: Topology, settings: PlannerSettings
) -> tuple[Plan, float]:
    started = time.perf_counter()
    solved = plan(snapshot.window(), live.placement, live.log2phy_RLE, topology, settings)
    return solved, time.perf_counter() - started
