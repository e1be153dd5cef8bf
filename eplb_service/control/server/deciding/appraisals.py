"""What balancing is worth, judged by a decision's steps beside what comes next: nobody waits for it."""

from __future__ import annotations

import asyncio
import itertools

import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.membership import Group
from eplb_service.control.server.deciding.planner_threads import PlannerThreads, outcome_of
from eplb_service.control.server.deciding.question import Question, appraise
from eplb_service.control.server.observing.worth_figures import figures_of
from eplb_service.planner.plan import Plan
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)


class Appraisals:
    """Judges decisions on threads; what an older one's steps say never replaces what a newer one's said.

    Parameters
    ----------
    threads, turns
        Where they are computed, and how many at a time.
    deadline
        Seconds after which one is given up.
    metrics
        Where their figures are shown.
    """

    def __init__(
        self, threads: PlannerThreads, turns: asyncio.Semaphore, deadline: float, metrics: Metrics
    ) -> None:
        self._threads = threads
        self._turns = turns
        self._deadline = deadline
        self._metrics = metrics
        self._numbers = itertools.count()
        self._known: dict[str, int] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Whether a decision's worth is still being judged."""
        return bool(self._under_way)

    def begin(self, deployment: Deployment, group: Group, question: Question, solved: Plan) -> None:
        """Judge by the steps of a decision that was made for a group."""
        judging = self._judge(deployment, group, question, solved, next(self._numbers))
        task = asyncio.create_task(judging)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def drop(self, name: str) -> None:
        """A deployment is gone."""
        self._known.pop(name, None)

    async def close(self) -> None:
        """Judge no more; what is being computed is thrown away."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _judge(
        self, deployment: Deployment, group: Group, question: Question, solved: Plan, number: int
    ) -> None:
        async with self._turns:
            computing = self._threads.compute(appraise, question, solved)
            try:
                found = await asyncio.wait_for(outcome_of(computing), self._deadline)
            except asyncio.TimeoutError:
                self._threads.give_up(deployment.name, computing)
                return
            except Exception:
                _log.exception("worth_unknown", deployment=deployment.name)
                return
        now = deployment.group
        if found is None or now is None or now.forming != group.forming:
            return
        if number > self._known.get(deployment.name, -1):
            self._known[deployment.name] = number
            deployment.appraised(found)
            self._metrics.worth.report(deployment.name, figures_of(found))
