"""Our policies and the engines' own along one trace: what each realises after its decisions, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from eplb_service.bench.closed_loop import LEFT_ALONE, Course, Entrant, cpu_after_first, loops, realised_mean
from eplb_service.bench.contest import OURS, Contest, first_scene
from eplb_service.bench.peers.archives import Package
from eplb_service.bench.peers.balancers import PEERS
from eplb_service.placement import mean_par
from eplb_service.planner.noise_floor import noise_floor

PACKAGES: dict[str, Package] = {package.name: package for package, _ in PEERS.values()}
"""The packages that peers come in, by name."""
OWN = (
    Entrant("flashlb (ours)", OURS),
    Entrant("deepseek (ours)", OURS, {"options": {"policy": "deepseek"}}),
)
"""This project's own policies, in default settings."""


@dataclass(frozen=True)
class PolicyResult:
    """One policy along the trace; every list has an entry for each decision.

    Parameters
    ----------
    label
        As tables name it.
    source
        Package and version that it is from.
    par_realised
        PAR of the window after each decision, mean over the layers that had tokens.
    moves
        Slots that had to receive weights.
    changed_layers
        Layers whose placement or tables changed.
    cpu_seconds, wall_seconds
        Of each decision.
    slots
        All slots of all layers, which moves are a part of.
    """

    label: str
    source: str
    par_realised: tuple[float, ...]
    moves: tuple[int, ...]
    changed_layers: tuple[int, ...]
    cpu_seconds: tuple[float, ...]
    wall_seconds: tuple[float, ...]
    slots: int

    @property
    def par(self) -> float:
        """Mean over windows; the first, which everybody places from scratch, counts where there is no other."""
        return realised_mean({"realised": self.par_realised})

    @property
    def moves_each(self) -> float:
        """Moves of a decision, without the first where there are others."""
        return fmean(self.moves[1:] or self.moves)

    @property
    def cpu_ms(self) -> float:
        """CPU time of a decision, without the first where there are others."""
        return cpu_after_first({"cpu_seconds": self.cpu_seconds}) * 1e3

    @property
    def wall_ms(self) -> float:
        """Time of a decision, without the first where there are others."""
        return cpu_after_first({"cpu_seconds": self.wall_seconds}) * 1e3


@dataclass(frozen=True)
class Comparison:
    """All policies over the same windows; ``floor`` is what token sampling alone leaves of PAR there."""

    floor: float
    policies: tuple[PolicyResult, ...]


def entrants_of(contest: Contest) -> list[Entrant]:
    """Doing nothing, our own policies, and the peers that take part, each named with its engine."""
    return [LEFT_ALONE, *OWN, *(Entrant(peer_label(name), name) for name in contest.peers)]


def peer_label(name: str) -> str:
    """A peer's name with its engine in front."""
    package = PEERS[name][0].name
    engine = {"vllm-ascend": "vLLM-Ascend", "vllm": "vLLM", "sglang": "SGLang"}[package]
    own = name.removeprefix(engine).removeprefix("Ascend").strip()
    return f"{own} ({engine})"


def compare(contest: Contest, course: Course, taking_part: Sequence[Entrant]) -> Comparison:
    """Run everybody along the course, one after another; one that fails is left out, which ``contest`` has reported."""
    contest.warm_up(
        [entrant.policy for entrant in taking_part if entrant is not LEFT_ALONE],
        first_scene(course.heat(0), course.ranks, course.slots),
    )
    sources = {entrant.label: _source(entrant) for entrant in taking_part}
    results = tuple(
        PolicyResult(
            label=row["policy"],
            source=sources[row["policy"]],
            par_realised=tuple(row["realised"]),
            moves=tuple(row["moves"]),
            changed_layers=tuple(row["changed_layers"]),
            cpu_seconds=tuple(row["cpu_seconds"]),
            wall_seconds=tuple(row["wall_seconds"]),
            slots=row["slots"],
        )
        for row in loops(contest, [course], taking_part)
    )
    served_TLE = course.heat_TLE[course.window : course.windows * course.window]
    floor_L = noise_floor(served_TLE.sum(axis=2, dtype=np.int64), course.ranks)
    return Comparison(float(mean_par(floor_L)), results)


def _source(entrant: Entrant) -> str:
    if entrant.policy not in PEERS:
        return "eplb-service"
    package = PEERS[entrant.policy][0]
    return f"{package.name} {package.version}"
