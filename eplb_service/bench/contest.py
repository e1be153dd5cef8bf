"""Who takes part, and how they are asked: in turn, each in a process of its own, warmed up before anything counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from eplb_service.bench.decision import Decision, Scene
from eplb_service.bench.ours import Ours
from eplb_service.bench.peers import balancers
from eplb_service.bench.peers.archives import PeerError, fetch
from eplb_service.bench.policy_process import Maker, PolicyFailedError, PolicyProcess
from eplb_service.placement import Placement

OURS = "ours"
OURS_EVEN = "ours, even split"
"""Knows that the host splits an expert's tokens evenly over its replicas, which is what even shares mean."""
NONE = "none"
"""Leaves everything in the engines' first layout."""


class Contest:
    """The policies that take part.

    Parameters
    ----------
    peers
        Names of the peers wanted, among ``balancers.PEERS``.
    index
        Package index that their sources come from; empty to fetch nothing.
    limit_seconds
        After so long a decision is given up.
    report
        Takes a line for the user.
    """

    def __init__(
        self, peers: Sequence[str], index: str, limit_seconds: float, report: Callable[[str], object]
    ) -> None:
        self._report = report
        self._limit_seconds = limit_seconds
        self._processes: dict[str, PolicyProcess] = {}
        self.failures: list[dict[str, str]] = []
        self.peers: list[str] = [name for name in peers if self._has(name, index)]

    def decide(self, name: str, scene: Scene, *, fresh: bool = True, **options: Any) -> Decision | None:
        """What ``ours`` (``options`` are those of ``Ours``) or a peer decides; ``None`` where it fails.

        ``fresh=False`` asks the one that decided last, with all that it remembers.
        """
        maker = partial(Ours, **options) if name == OURS else partial(balancers.make, name, **options)
        return self._ask(name, maker, scene, fresh)

    def decide_from_scratch(self, name: str, scene: Scene) -> Decision | None:
        """What a policy decides that places everything from scratch: a fresh peer, ``OURS`` or ``OURS_EVEN``."""
        if name in (OURS, OURS_EVEN):
            options = {"split": "even"} if name == OURS_EVEN else {}
            return self.decide(OURS, scene, afresh=True, options=options)
        return self.decide(name, scene)

    def warm_up(self, names: Sequence[str], scene: Scene) -> None:
        """Have everybody decide once, on two layers of a scene, so that nothing is compiled while it counts."""
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

    def _ask(self, name: str, maker: Maker, scene: Scene, fresh: bool) -> Decision | None:
        process = self._processes.setdefault(name, PolicyProcess(self._limit_seconds))
        try:
            return process.decide(maker, scene, fresh=fresh)
        except PolicyFailedError as error:
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
