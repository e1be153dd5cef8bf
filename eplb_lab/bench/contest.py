"""Processes that run the policies, one process per policy, warmed up before anything is measured.

A policy that crashes or hangs affects only its own figures. Our policies and the peers run in the same kind of process,
each on one thread. Time limits count CPU time, so that a busy machine does not exclude a policy.
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
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.policies import PolicyFunction, external_policy, run_external_policy
from eplb_core.planner.request import with_options
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_lab.bench.decision import Decision, Policy, Scene
from eplb_lab.bench.peers import balancers
from eplb_lab.bench.peers.archives import IndexUnreachableError, PeerError, fetch

OURS = "ours"
OURS_EVEN = "ours, even split"
"""Our planner for hosts that split an expert's tokens evenly over its replicas."""
NONE = "none"
"""Policy that keeps the engines' initial layout."""


class Contest:
    """Comparison of our policies with peers.

    Parameters
    ----------
    peers
        Names of the peers, as in ``balancers.PEERS``.
    index
        URL of the package index that provides the peers' sources; empty to use only cached sources.
    limit_seconds
        CPU seconds after which a decision times out. A decision also times out if its process is blocked.
    report
        Callback that receives each line of output for the user.
    """

    def __init__(
        self, peers: Sequence[str], index: str, limit_seconds: float, report: Callable[[str], object]
    ) -> None:
        self._report = report
        self._limit_seconds = limit_seconds
        self._processes: dict[str, _Process] = {}
        self._unreachable: IndexUnreachableError | None = None
        self.failures: list[dict[str, str]] = []
        self.peers: list[str] = [name for name in peers if self._fetch(name, index)]

    def decide(self, name: str, scene: Scene, *, fresh: bool = True, **options: Any) -> Decision | None:
        """Return the decision of our planner or a peer, or ``None`` if it fails.

        Parameters
        ----------
        name
            ``ours`` or a peer's name.
        scene
            Window and current layout.
        fresh
            True to create a new policy; False to keep using the last decision's policy, with its state.
        options
            Keyword arguments of ``_Ours`` if the name is ``ours``.
        """
        maker = partial(_Ours, **options) if name == OURS else partial(balancers.make, name)
        return self._ask(name, maker if fresh else None, scene)

    def decide_from_scratch(self, name: str, scene: Scene) -> Decision | None:
        """Return the decision of a fresh policy that places every layer from scratch, or ``None`` if it fails.

        Parameters
        ----------
        name
            ``OURS``, ``OURS_EVEN`` or a peer's name.
        scene
            Window and current layout.
        """
        if name in (OURS, OURS_EVEN):
            options = {"split": "even"} if name == OURS_EVEN else {}
            return self.decide(OURS, scene, afresh=True, options=options)
        return self.decide(name, scene)

    def warm_up(self, names: Sequence[str], scene: Scene) -> list[str]:
        """Run each policy once on two layers of a scene, so that compilation is not measured.

        Returns
        -------
        list of str
            Names of the policies that returned a decision.
        """
        small = Scene(scene.heat_TLE[:, :2], scene.placement_LRS[:2], scene.tables_RLE[:, :2])
        return [name for name in dict.fromkeys(names) if self.decide(name, small) is not None]

    def restart(self, name: str) -> None:
        """Terminate the policy's process. The policy's next decision starts a new one."""
        if name in self._processes:
            self._processes.pop(name).end()

    def close(self) -> None:
        """Terminate all processes."""
        for name in list(self._processes):
            self.restart(name)

    def _ask(self, name: str, maker: Callable[[], Policy] | None, scene: Scene) -> Decision | None:
        """Run one decision in the policy's process.

        If ``maker`` is ``None``, the policy from the last call decides. The result is ``None`` if the decision fails.
        """
        if name not in self._processes:
            self._processes[name] = _Process()
        result = self._processes[name].ask(maker, scene, self._limit_seconds)
        if isinstance(result, Decision):
            problem = why_not_served(result, scene)
            if problem is None:
                return result
        elif result is None:
            problem = self._processes[name].why_ended(self._limit_seconds)
            self.restart(name)
        else:
            problem = result
        shape = "x".join(str(size) for size in (*scene.placement_LRS.shape, scene.heat_TLE.shape[2]))
        self._fail(name, f"layers x ranks x slots x experts {shape}: {problem}")
        return None

    def _fetch(self, name: str, index: str) -> bool:
        """Fetch a peer's sources and return True if they are available. Report a failure.

        Once the index has timed out, peers that are not cached fail without another request.
        """
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
        self._report(f"{name} is excluded: {why}")


_WALL_PER_CPU = 20.0
"""Wall-clock seconds allowed per CPU second of the limit. Generous, because a busy machine slows every policy."""
_IDLE_SECONDS = 15.0
"""Seconds between measurements of a process's CPU time. Even on a busy machine, a running process gets some."""
_IDLE_FRACTION = 0.003
"""CPU use, as a fraction of one core, at or below which a process counts as blocked."""


class _Process:
    """Child process that runs one decision at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._link, child_link = context.Pipe()
        self._process = context.Process(target=_serve_decisions, args=(child_link,), daemon=True)
        self._process.start()
        child_link.close()
        self._ready = False
        self._is_idle = False

    def ask(
        self, maker: Callable[[], Policy] | None, scene: Scene, limit_seconds: float
    ) -> Decision | str | None:
        """Return the decision or an error message, or ``None`` if the process has exited, is blocked or timed out."""
        try:
            if not self._ready:
                # Startup can be slow on a busy machine, and must not count towards the decision's time limit.
                if not self._wait_for_result(limit_seconds):
                    return None
                self._ready = self._link.recv()
            self._link.send((maker, scene, limit_seconds))
            if not self._wait_for_result(limit_seconds):
                return None
            result: Decision | str = self._link.recv()
        except (EOFError, OSError):
            return None
        return result

    def _wait_for_result(self, limit_seconds: float) -> bool:
        """Wait until a result can be received. Return False if the process is blocked or takes too long."""
        deadline = time.monotonic() + _WALL_PER_CPU * limit_seconds
        spent = _cpu_seconds(self._process.pid)
        while not self._link.poll(_IDLE_SECONDS):
            before = spent
            spent = _cpu_seconds(self._process.pid)
            if spent is not None and before is not None:
                self._is_idle = spent - before < _IDLE_FRACTION * _IDLE_SECONDS
            if self._is_idle or time.monotonic() > deadline:
                return False
        return True

    def why_ended(self, limit_seconds: float) -> str:
        """Return the reason why ``ask`` returned ``None``."""
        if self._is_idle and self._process.is_alive():
            return f"its process is blocked: it has used almost no CPU for {_IDLE_SECONDS:g} s"
        self._process.join(_SECONDS_TO_END)
        code = self._process.exitcode
        if code is None:
            return f"it did not decide within {_WALL_PER_CPU * limit_seconds:g} s"
        if code == -signal.SIGPROF:
            return f"it took more than {limit_seconds:g} s of CPU time"
        return f"its process exited with code {code}"

    def end(self) -> None:
        """Terminate the process."""
        self._link.close()
        self._process.kill()
        self._process.join()


def _cpu_seconds(process: int | None) -> float | None:
    """Return the CPU time of a process and all its threads, or ``None`` if it cannot be read."""
    try:
        # The program name is in parentheses and may contain spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


_SECONDS_TO_END = 1.0
"""Seconds to wait for the exit code of a process that has closed its link."""


def _serve_decisions(link: Connection) -> None:
    """Run decisions in a policy's process until the parent closes the link."""
    # Ctrl-C reaches all processes. The parent process handles it and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    link.send(True)
    while True:
        try:
            maker, scene, limit_seconds = link.recv()
        except EOFError:
            return
        # The signal terminates this process, even inside a library call that never returns to Python.
        signal.setitimer(signal.ITIMER_PROF, limit_seconds)
        result = _decide(maker, scene)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        link.send(result)


def why_not_served(decision: Decision, scene: Scene) -> str | None:
    """Return the reason why ranks cannot serve a decision, or ``None`` if they can.

    A placement is allowed to hold an expert twice on the same rank.
    """
    try:
        placed_LRS = np.asarray(decision.placement_LRS)
    except ValueError:
        return "it returned a placement that is not an array"
    if placed_LRS.shape != scene.placement_LRS.shape:
        return f"it returned a placement of shape {list(placed_LRS.shape)}, expected {list(scene.placement_LRS.shape)}"
    experts = scene.heat_TLE.shape[2]
    try:
        checked_foreign(placed_LRS, experts)
    except PlacementError as error:
        return f"it returned an invalid placement ({error})"
    if (placed_LRS < 0).any():
        return "it returned an invalid placement, which leaves slots empty"
    return None


_POLICY: list[Policy] = []
"""This process's policy, with its state. The list is empty until the first decision."""


def _decide(maker: Callable[[], Policy] | None, scene: Scene) -> Decision | str:
    """Run a decision in this process and return it, or the last line of the traceback if it fails."""
    try:
        if maker is not None:
            _POLICY[:] = [maker()]
        return _POLICY[0].decide(scene)
    except Exception:
        return traceback.format_exc(limit=-1).strip().splitlines()[-1]


def first_scene(heat_TLE: np.ndarray, ranks: int, slots: int) -> Scene:
    """Return a scene with a window and the engines' initial layout, which places the experts in order.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert.
    ranks
        R, the number of ranks.
    slots
        S, the number of slots per rank.

    Examples
    --------
    >>> scene = first_scene(np.ones((1, 1, 3), dtype=np.int32), ranks=2, slots=2)
    >>> scene.placement_LRS
    array([[[0, 1],
            [2, 0]]], dtype=int32)
    """
    _, layers, experts = heat_TLE.shape
    placement = Placement.linear(layers, experts, ranks, slots)
    return Scene(np.ascontiguousarray(heat_TLE), placement.phy2log_LRS, placement.default_log2phy())


class _Ours:
    """Our planner, or a user's policy, on one thread.

    Parameters
    ----------
    afresh
        True to place every layer from scratch.
    options
        Settings that replace the planner's defaults.
    external
        ``module:function`` of a user's policy that decides instead of the planner; empty for the planner.
    """

    def __init__(
        self, *, afresh: bool = False, options: Mapping[str, Any] | None = None, external: str = ""
    ) -> None:
        self._afresh = afresh
        self._options = options or {}
        self._external = external
        self._function = external_policy(external) if external else None

    def decide(self, scene: Scene) -> Decision:
        """Make the decision for one window. The measured time includes validating the heat."""
        if self._function is not None:
            return self._decide_externally(scene, self._function)
        settings, search = with_options(PlannerSettings(threads=1), self._options)
        placement = Placement(scene.placement_LRS, scene.heat_TLE.shape[2])
        topology = Topology.flat(placement.ranks)
        cpu_start = time.process_time()
        wall_start = time.perf_counter()
        window = Window(scene.heat_TLE, scene.source_RLE)
        if self._afresh:
            result = plan_from_scratch(window, placement, topology, settings, search)
        else:
            result = plan(window, placement, scene.tables_RLE, topology, settings, search=search)
        cpu_seconds = time.process_time() - cpu_start
        wall_seconds = time.perf_counter() - wall_start
        new_placement, tables_RLE = apply_layers(placement, scene.tables_RLE, result.changes())
        promised_L = np.array([verdict.par_planned for verdict in result.verdicts])
        return Decision(
            new_placement.phy2log_LRS, tables_RLE, promised_L, len(result.layers), cpu_seconds, wall_seconds
        )

    def _decide_externally(self, scene: Scene, function: PolicyFunction) -> Decision:
        """Call the user's function and return its placement and tables as a decision."""
        current = Placement(scene.placement_LRS, scene.heat_TLE.shape[2])
        window = Window(scene.heat_TLE, scene.source_RLE)
        cpu_start = time.process_time()
        wall_start = time.perf_counter()
        placement, tables_RLE = run_external_policy(self._external, function, window, current)
        cpu_seconds = time.process_time() - cpu_start
        wall_seconds = time.perf_counter() - wall_start
        changed = int((placement.phy2log_LRS != scene.placement_LRS).any(axis=(1, 2)).sum())
        return Decision(placement.phy2log_LRS, tables_RLE, None, changed, cpu_seconds, wall_seconds)
