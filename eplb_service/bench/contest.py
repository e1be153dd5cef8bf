"""The contest of policies: asked in turn, each in a process of its own, warmed up before anything counts.

A policy that crashes or never ends costs only its own figures. _Ours and the peers run in the same kind of process, one
thread each.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
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

_Maker = Callable[[], Policy]
"""Makes a policy; travels to the process, so it must be importable there."""


class Contest:
    """The policies that take part: ours, and the ``peers`` whose sources are had from ``index``, which may be empty.

    A decision is given up after ``limit_seconds``; ``report`` takes a line for the user.
    """

    def __init__(
        self, peers: Sequence[str], index: str, limit_seconds: float, report: Callable[[str], object]
    ) -> None:
        self._report = report
        self._limit_seconds = limit_seconds
        self._processes: dict[str, _PolicyProcess] = {}
        self.failures: list[dict[str, str]] = []
        self.peers: list[str] = [name for name in peers if self._has(name, index)]

    def decide(self, name: str, scene: Scene, *, fresh: bool = True, **options: Any) -> Decision | None:
        """Return the decision of ``ours`` (``options`` are those of ``_Ours``) or a peer; ``None`` where it fails.

        ``fresh=False`` asks the one that decided last, with all that it remembers.
        """
        maker = partial(_Ours, **options) if name == OURS else partial(balancers.make, name, **options)
        return self._ask(name, maker, scene, fresh)

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
            self._processes.pop(name).close()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()

    def _ask(self, name: str, maker: _Maker, scene: Scene, fresh: bool) -> Decision | None:
        process = self._processes.setdefault(name, _PolicyProcess(self._limit_seconds))
        try:
            return process.decide(maker, scene, fresh=fresh)
        except _PolicyFailedError as error:
            shape = "x".join(str(size) for size in (*scene.placement_LRS.shape, scene.heat_TLE.shape[2]))
            self._fail(name, f"layers x ranks x slots x experts {shape}: {error}")
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


def first_scene(heat_TLE: np.ndarray, ranks: int, slots: int) -> Scene:
    """A window that is served in the engines' first layout."""
    _, layers, experts = heat_TLE.shape
    placement = Placement.linear(layers, experts, ranks, slots)
    return Scene(np.ascontiguousarray(heat_TLE), placement.phy2log_LRS, placement.default_log2phy())


class _PolicyFailedError(RuntimeError):
    """A policy that crashed, refused or took too long; the message says which."""


class _PolicyProcess:
    """One process that decides by policies it is given; a decision of ``limit_seconds`` is given up."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def decide(self, maker: _Maker, scene: Scene, *, fresh: bool = True) -> Decision:
        """Have a policy decide: a fresh one, or the one of the last call with all that it remembers.

        Raises ``_PolicyFailedError``; the next call starts a new process where this one was lost.
        """
        if self._process is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((maker if fresh else None, scene))
            if not self._connection.poll(self.limit_seconds):
                raise _PolicyFailedError(f"took more than {self.limit_seconds:g} s")
            answer = self._connection.recv()
        except (_PolicyFailedError, EOFError, OSError) as error:
            self.close()
            reason = str(error) if isinstance(error, _PolicyFailedError) else "its process died"
            raise _PolicyFailedError(reason) from error
        if isinstance(answer, Decision):
            return answer
        raise _PolicyFailedError(answer)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._connection = here
        process = context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        self._process = process
        there.close()


def _serve(connection: Connection) -> None:
    """Serve requests until the other end closes."""
    # Ctrl-C reaches both processes; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    policy: Policy | None = None
    while True:
        try:
            maker, scene = connection.recv()
        except EOFError:
            return
        try:
            policy = maker() if maker is not None else policy
            assert policy is not None
            connection.send(policy.decide(scene))
        except Exception:
            connection.send(traceback.format_exc(limit=-1).strip().splitlines()[-1])


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
