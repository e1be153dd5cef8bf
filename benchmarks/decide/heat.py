"""Heat to decide on: generated kinds, workloads one after the other, and recorded routing where there is any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.solver.heats import generate
from eplb_service.placement import Int32

PHASE = 96
"""Steps of each workload in a sequence."""
_BY_CLOCK = "no worse than by the clock"


@dataclass(frozen=True)
class Course:
    """Heat ``[T, L, E]`` to serve, the ranks and slots that serve it, and the window of who decides by the clock."""

    name: str
    heat_TLE: Int32
    ranks: int
    slots: int
    window: int
    target: str = ""


def generated(seed: int) -> Iterator[Course]:
    """The four kinds of generated heat, 4 layers of 256 experts on 32 ranks x 9 slots, twelve windows of each."""
    for kind, target in (
        ("static", _BY_CLOCK),
        ("phased", _BY_CLOCK),
        ("bursty", "1.60 at 20 moves"),
        ("drift", "1.30 at 182 moves"),
    ):
        heat_TLE = np.array(generate(kind, 4, 256, 128 * 12, seed))
        yield Course(kind, heat_TLE, 32, 9, 128, target)


def recorded(folder: Path, seed: int) -> Iterator[Course]:
    """Routing that was recorded, of whichever models the folder holds."""
    steps = folder / "gpt-oss-20b" / "decode_steps_b64.npz"
    if steps.exists():
        heat_TLE = np.load(steps)["counts"][:, ::2].astype(np.int32)
        heat_TLE = np.ascontiguousarray(heat_TLE[: len(heat_TLE) // 64 * 64])
        yield Course("gpt-oss decode", heat_TLE, 8, 5, 64, "1.242, FlashLB's moves / 5")
    for model, experts, tokens, ranks, slots in (
        ("deepseek-v2-lite-esft", 64, 640, 8, 10),
        ("gpt-oss-20b", 32, 1024, 8, 5),
    ):
        if (folder / model / "routes.npz").exists():
            heat_TLE = _sequence(folder / model, experts, tokens, seed)
            yield Course(f"{model} workloads", heat_TLE, ranks, slots, PHASE // 2, "at most 1.085")


def _sequence(folder: Path, experts: int, tokens: int, seed: int) -> Int32:
    """Eight workloads one after the other, each step's tokens drawn from those of the workload's own requests."""
    with np.load(folder / "routes.npz") as arrays:
        routes_NLK, bounds = arrays["routes"], arrays["req_ptr"]
    requests = json.loads((folder / "requests.json").read_text())
    members: dict[str, list[np.ndarray]] = {}
    for number, request in enumerate(requests):
        name = request.get("domain") or request["category"]
        if not request.get("repetition"):
            members.setdefault(name, []).append(np.arange(bounds[number], bounds[number + 1]))
    pools = sorted((np.concatenate(rows) for rows in members.values()), key=len, reverse=True)[:8]
    generator = np.random.default_rng(seed)
    drawn = [
        _step(routes_NLK[generator.choice(pools[phase % len(pools)], tokens)], experts)
        for phase in range(8)
        for _ in range(PHASE)
    ]
    return np.stack(drawn)


def _step(routes_TLK: np.ndarray, experts: int) -> Int32:
    layers: Sequence[np.ndarray] = [
        np.bincount(routes_TLK[:, layer].ravel(), minlength=experts) for layer in range(routes_TLK.shape[1])
    ]
    return np.stack(layers).astype(np.int32)
