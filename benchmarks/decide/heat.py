"""Heat to decide on: generated kinds, workloads one after the other, and recorded routing where there is any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.solver.heats import KINDS, generate
from eplb_service.bench.closed_loop import Course
from eplb_service.placement import Int32

PHASE = 96
"""Steps of each workload in a sequence."""


TARGETS = {
    "static": "1.102 at 0 moves",
    "phased": "1.106 at 0 moves",
    "bursty": "1.59 at 20 moves",
    "drift": "1.21 at 400 moves",
    "gpt-oss decode": "1.21 at 16 moves",
    "deepseek-v2-lite-esft workloads": "at most 1.085",
    "gpt-oss-20b workloads": "at most 1.09",
}
"""Of ours, by the heat's name."""


def generated(seed: int, layers: int) -> Iterator[Course]:
    """The four kinds of generated heat, layers of 256 experts on 32 ranks x 9 slots, twelve windows of each."""
    for kind in KINDS:
        heat_TLE = np.array(generate(kind, layers, 256, 128 * 12, seed))
        yield Course(kind, heat_TLE, 32, 9, 128)


def recorded(folder: Path, seed: int) -> Iterator[Course]:
    """Routing that was recorded, of whichever models the folder holds."""
    steps = folder / "gpt-oss-20b" / "decode_steps_b64.npz"
    if steps.exists():
        heat_TLE = np.load(steps)["counts"][:, ::2].astype(np.int32)
        heat_TLE = np.ascontiguousarray(heat_TLE[: len(heat_TLE) // 64 * 64])
        yield Course("gpt-oss decode", heat_TLE, 8, 5, 64)
    for model, experts, tokens, ranks, slots in (
        ("deepseek-v2-lite-esft", 64, 640, 8, 10),
        ("gpt-oss-20b", 32, 1024, 8, 5),
    ):
        if (folder / model / "routes.npz").exists():
            heat_TLE = _sequence(folder / model, experts, tokens, seed)
            yield Course(f"{model} workloads", heat_TLE, ranks, slots, PHASE // 2)


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
