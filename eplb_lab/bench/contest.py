"""The contest of policies: asked in turn, each in a process of its own, warmed up before anything counts.

A policy that crashes or never ends costs only its own figures. Ours and the peers run in the same kind of process, one
thread each. Limits are of CPU time, so a busy machine excludes nobody.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, PlacementError, apply_layers, checked_foreign
from eplb_core.planner.decide import plan, plan_afresh
from eplb_core.planner.policies import PolicyFunction, answer_of, external_policy
from eplb_core.planner.request import with_options
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_lab.bench.decision import Decision, Policy, Scene
from eplb_lab.bench.peers import balancers
from eplb_lab.bench.peers.archives import IndexUnreachableError, PeerError, fetch

OURS = "ours"
OURS_EVEN = "ours, even split"
"""Knows that the host splits an expert's tokens evenly over its replicas, which is what even shares mean."""
NONE = "none"
"""Leaves everything in the engines' first layout."""


class Contest:
    """Comparison of our policies with ``peers``, whose sources are fetched from ``index`` (may be empty).

    A decision times out after ``limit_seconds`` of CPU time, or if its process is blocked. ``report`` is called with
    each line for the user.
    """

    def __init__(
        self, peers: Sequence[str], index: str, limit_seconds: float, report: Callable[[str], object]
    ) -> None:
        self._report = report
        self._limit_seconds = limit_seconds
        self._processes: dict[str, _Process] = {}
        self._unreachable: IndexUnreachableError | None = None
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

    def warm_up(self, names: Sequence[str], scene: Scene) -> list[str]:
        """Run each policy once, on two layers of a scene, so that compilation is not measured.

        Returns
        -------
        list of str
            Policies that returned a decision.
        """
        small = Scene(scene.heat_TLE[:, :2], scene.placement_LRS[:2], scene.tables_RLE[:, :2])
        return [name for name in dict.fromkeys(names) if self.decide(name, small) is not None]

    def restart(self, name: str) -> None:
        """Let the next decision begin in a new process."""
        if name in self._processes:
            self._processes.pop(name).end()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._processes):
            self.restart(name)

    def _ask(self, name: str, maker: Callable[[], Policy] | None, scene: Scene) -> Decision | None:
        """Have a policy decide in its process: a new one, or without a ``maker`` the one of the last call."""
        if name not in self._processes:
            self._processes[name] = _Process()
        answer = self._processes[name].ask(maker, scene, self._limit_seconds)
        if answer is None:
            answer = self._processes[name].why_ended(self._limit_seconds)
            self.restart(name)
        if isinstance(answer, Decision):
            wrong = why_not_served(answer, scene)
            if wrong is None:
                return answer
            answer = wrong
        shape = "x".join(str(size) for size in (*scene.placement_LRS.shape, scene.heat_TLE.shape[2]))
        self._fail(name, f"layers x ranks x slots x experts {shape}: {answer}")
        return None

    def _has(self, name: str, index: str) -> bool:
        package = balancers.PEERS[name][0]
        try:
            if self._unreachable is not None and not package.root.exists():
                raise self._unreachable
            fetch(package, index)
        except PeerError as error:
            self._unreachable = error if isinstance(error, IndexUnreachableError) else self._unreachable
            self._fail(name, str(error))
            return False
        return True

    def _fail(self, name: str, why: str) -> None:
        self.failures.append({"policy": name, "why": why})
        self._report(f"{name} takes no part here: {why}")


_WALL_PER_CPU = 20.0
"""Wall-clock seconds per second of the CPU limit. A policy that takes longer times out, even on a busy machine."""
_IDLE_SECONDS = 15.0
"""Seconds within which a computing process gets CPU time, even on a busy machine."""
_IDLE_PART = 0.003
"""CPU use, as a fraction of one core, at or below which a process counts as blocked."""


class _Process:
    """A process of its own that answers one question at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_answer_questions, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False
        self._is_idle = False

    def ask(
        self, maker: Callable[[], Policy] | None, scene: Scene, limit_seconds: float
    ) -> Decision | str | None:
        """Return the decision, or why there is none; ``None`` if the process ended or waits for too long."""
        try:
            if not self._ready:
                # Starting takes a while on a busy machine, and is no part of the decision.
                if not self._has_answer(limit_seconds):
                    return None
                self._ready = self._link.recv()
            self._link.send((maker, scene, limit_seconds))
            if not self._has_answer(limit_seconds):
                return None
            answer: Decision | str = self._link.recv()
        except (EOFError, OSError):
            return None
        return answer

    def _has_answer(self, limit_seconds: float) -> bool:
        """Wait for an answer. Return False if the process is blocked or takes too long."""
        deadline = time.monotonic() + _WALL_PER_CPU * limit_seconds
        spent = _cpu_seconds(self._process.pid)
        while not self._link.poll(_IDLE_SECONDS):
            before = spent
            spent = _cpu_seconds(self._process.pid)
            if spent is not None and before is not None:
                self._is_idle = spent - before < _IDLE_PART * _IDLE_SECONDS
            if self._is_idle or time.monotonic() > deadline:
                return False
        return True

    def why_ended(self, limit_seconds: float) -> str:
        """Say why there was no answer."""
        if self._is_idle and self._process.is_alive():
            return f"is blocked: it has used almost no CPU for {_IDLE_SECONDS:g} s"
        self._process.join(_SECONDS_TO_END)
        code = self._process.exitcode
        if code is None:
            return f"gave no answer within {_WALL_PER_CPU * limit_seconds:g} s"
        if code == -signal.SIGPROF:
            return f"took more than {limit_seconds:g} s of CPU time"
        return f"its process ended with code {code}"

    def end(self) -> None:
        """End the process."""
        self._link.close()
        self._process.kill()
        self._process.join()


def _cpu_seconds(process: int | None) -> float | None:
    """Return the CPU time of a process and all its threads, or ``None`` if unknown."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


_SECONDS_TO_END = 1.0
"""Seconds to wait for the exit code of a process whose link has ended."""


def _answer_questions(link: Connection) -> None:
    """Answer in the process of a policy until the other end is closed."""
    # Ctrl-C reaches all processes; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    link.send(True)
    while True:
        try:
            maker, scene, limit_seconds = link.recv()
        except EOFError:
            return
        # The signal ends this process, even inside a library that never returns to Python.
        signal.setitimer(signal.ITIMER_PROF, limit_seconds)
        answer = _decide(maker, scene)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        link.send(answer)


def why_not_served(decision: Decision, scene: Scene) -> str | None:
    """Say why ranks could not serve a decision; ``None`` if they could. Duplicates on a rank can be served."""
    try:
        placed_LRS = np.asarray(decision.placement_LRS)
    except ValueError:
        return "answered no array"
    if placed_LRS.shape != scene.placement_LRS.shape:
        return f"answered the shape {list(placed_LRS.shape)}, expected {list(scene.placement_LRS.shape)}"
    experts = scene.heat_TLE.shape[2]
    try:
        checked_foreign(placed_LRS, experts)
    except PlacementError as error:
        return f"answered no placement ({error})"
    if (placed_LRS < 0).any():
        return "answered no placement (it leaves slots empty)"
    return None


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
    """The planner; ``options`` override its defaults and one thread, ``afresh`` places every layer from scratch.

    ``external`` names a policy of the user's own, which decides instead.
    """

    def __init__(
        self, *, afresh: bool = False, options: Mapping[str, Any] | None = None, external: str = ""
    ) -> None:
        self._afresh = afresh
        self._options = options or {}
        self._external, self._function = external, external_policy(external) if external else None

    def decide(self, scene: Scene) -> Decision:
        """Decide on one window; checking the heat is part of what is timed."""
        if self._function is not None:
            return self._answered(scene, self._function)
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

    def _answered(self, scene: Scene, function: PolicyFunction) -> Decision:
        deployed = Placement(scene.placement_LRS, scene.heat_TLE.shape[2])
        window = Window(scene.heat_TLE, scene.source_RLE)
        cpu, wall = time.process_time(), time.perf_counter()
        placement, tables_RLE = answer_of(self._external, function, window, deployed)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        changed = int((placement.phy2log_LRS != scene.placement_LRS).any(axis=(1, 2)).sum())
        return Decision(placement.phy2log_LRS, tables_RLE, None, changed, cpu, wall)
