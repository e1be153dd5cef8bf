"""The contest of policies: asked in turn, each in a process of its own, warmed up before anything counts.

A policy that crashes or never ends costs only its own figures. _Ours and the peers run in the same kind of process, one
thread each.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import TimeoutError, get_context
from multiprocessing.pool import Pool
from typing import Any

import numpy as np

from eplb_service.bench.decision import Decision, Policy, Scene
from eplb_service.bench.peers import balancers
from eplb_service.bench.peers.archives import PeerError, fetch
from eplb_service.heat.window import Window
from eplb_service.placement import Placement, apply_layers
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.request import with_options
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology

OURS = "ours"
OURS_EVEN = "ours, even split"
"""Knows that the host splits an expert's tokens evenly over its replicas, which is what even shares mean."""
NONE = "none"
"""Leaves everything in the engines' first layout."""


class Contest:
    """The policies that take part: ours, and the ``peers`` whose sources are had from ``index``, which may be empty.

    A decision is given up after ``limit_seconds``; ``report`` takes a line for the user.
    """

    def __init__(
        self, peers: Sequence[str], index: str, limit_seconds: float, report: Callable[[str], object]
    ) -> None:
        self._report = report
        self._limit_seconds = limit_seconds
        self._processes: dict[str, Pool] = {}
        self.failures: list[dict[str, str]] = []
        self.peers: list[str] = [name for name in peers if self._has(name, index)]

    def decide(self, name: str, scene: Scene, *, fresh: bool = True, **options: Any) -> Decision | None:
        """Return the decision of ``ours`` (``options`` are those of ``_Ours``) or a peer; ``None`` where it fails.

        ``fresh=False`` asks the one that decided last, with all that it remembers.
        """
        maker = partial(_Ours, **options) if name == OURS else partial(balancers.make, name)
        return self._ask(name, maker if fresh else None, scene)

    def decide_from_scratch(self, name: str, scene: Scene) -> Decision | None:
        """Return a decision that places everything from scratch: of a fresh peer, ``OURS`` or ``OURS_EVEN``."""
        if name in (OURS, OURS_EVEN):
            options = {"split": "even"} if name == OURS_EVEN else {}
            return self.decide(OURS, scene, afresh=True, options=options)
        return self.decide(name, scene)

    def warm_up(self, names: Sequence[str], scene: Scene) -> None:
        """Have all decide once, on two layers of a scene, so that nothing is compiled while it counts."""
        small = Scene(scene.heat_TLE[:, :2], scene.placement_LRS[:2], scene.tables_RLE[:, :2])
        for name in names:
            self.decide(name, small)

    def restart(self, name: str) -> None:
        """Let the next decision begin in a new process."""
        if name in self._processes:
            self._processes.pop(name).terminate()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._processes):
            self.restart(name)

    def _ask(self, name: str, maker: Callable[[], Policy] | None, scene: Scene) -> Decision | None:
        """Have a policy decide in its process: a new one, or without a ``maker`` the one of the last call."""
        if name not in self._processes:
            # Ctrl-C reaches all processes; the one that started this one ends it.
            ignoring = (signal.SIGINT, signal.SIG_IGN)
            self._processes[name] = get_context("spawn").Pool(1, signal.signal, ignoring)
        try:
            answer = self._processes[name].apply_async(_decide, (maker, scene)).get(self._limit_seconds)
        except TimeoutError:
            self.restart(name)
            answer = f"took more than {self._limit_seconds:g} s, or its process died"
        if isinstance(answer, Decision):
            return answer
        shape = "x".join(str(size) for size in (*scene.placement_LRS.shape, scene.heat_TLE.shape[2]))
        self._fail(name, f"layers x ranks x slots x experts {shape}: {answer}")
        return None

    def _has(self, name: str, index: str) -> bool:
        try:
            fetch(balancers.PEERS[name][0], index)
        except PeerError as error:
            self._fail(name, str(error))
            return False
        return True

    def _fail(self, name: str, why: str) -> None:
        self.failures.append({"policy": name, "why": why})
        self._report(f"{name} takes no part here: {why}")


_REMEMBERED: list[Policy] = []
"""The policy of a process, with all that it remembers."""


def _decide(maker: Callable[[], Policy] | None, scene: Scene) -> Decision | str:
    """A decision in a policy's own process, or why there is none."""
    try:
        if maker is not None:
            _REMEMBERED[:] = [maker()]
        return _REMEMBERED[0].decide(scene)
    except Exception:
        return traceback.format_exc(limit=-1).strip().splitlines()[-1]


def first_scene(heat_TLE: np.ndarray, ranks: int, slots: int) -> Scene:
    """A window that is served in the engines' first layout."""
    _, layers, experts = heat_TLE.shape
    placement = Placement.linear(layers, experts, ranks, slots)
    return Scene(np.ascontiguousarray(heat_TLE), placement.phy2log_LRS, placement.default_log2phy())


class _Ours:
    """The planner; ``options`` override its defaults and one thread, ``afresh`` places every layer from scratch."""

    def __init__(self, *, afresh: bool = False, options: Mapping[str, Any] | None = None) -> None:
        self._afresh = afresh
        self._options = options or {}

    def decide(self, scene: Scene) -> Decision:
        """Decide on one window; checking the heat is part of what is timed."""
        settings, search = with_options(PlannerSettings(threads=1), self._options)
        placement = Placement(scene.placement_LRS, scene.heat_TLE.shape[2])
        topology = Topology.flat(placement.ranks)
        cpu, wall = time.process_time(), time.perf_counter()
        window = Window(scene.heat_TLE, scene.source_RLE)
        if self._afresh:
            made = plan_afresh(window, placement, topology, settings, search)
        else:
            made = plan(window, placement, scene.tables_RLE, topology, settings, search=search)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        after, tables_RLE = apply_layers(placement, scene.tables_RLE, made.changes())
        promised_L = np.array([verdict.par_planned for verdict in made.verdicts])
        return Decision(after.phy2log_LRS, tables_RLE, promised_L, len(made.layers), cpu, wall)
