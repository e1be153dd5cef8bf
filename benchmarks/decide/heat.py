"""Heat to decide on: generated kinds, sequences of workloads, and recorded routing if available."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.solver.heats import KINDS, generate
from eplb_core.placement import Int32
from eplb_lab.bench.closed_loop import Scenario

PHASE = 96
"""Number of steps of each workload in a sequence."""
UNTUNED = ("turnover", "seasonal")
"""Kinds of heat that were not used to tune any planner constant. Each kind has its own seeds."""
_UNTUNED_SEED = 1000
SHIPPED = Path(__file__).parents[2] / "docs" / "examples" / "byte_moe_decoding.npz"
"""Recording of the shipped model while it decodes. It is part of every checkout."""

TARGETS = {
    "static": "1.102 at 0 moves",
    "phased": "1.106 at 0 moves",
    "bursty": "1.59 at 20 moves",
    "drift": "1.21 at 400 moves",
    "gpt-oss decode": "1.21 at 16 moves",
    "deepseek-v2-lite-esft workloads": "at most 1.085",
    "gpt-oss-20b workloads": "at most 1.09",
}
"""Targets for our policy if plans take effect at once, keyed by the name of the heat."""
PACED_TARGETS = {"drift": "at most 1.30"}
"""Targets for our policy if plans take effect at the pace of a model with 58 layers."""


def generated(seed: int, layers: int, windows: int = 12) -> Iterator[Scenario]:
    """Yield ``windows`` windows of each of the four kinds of generated heat, for 256 experts on 32 ranks x 9 slots."""
    for kind in KINDS:
        heat_TLE = np.array(generate(kind, layers, 256, 128 * windows, seed))
        yield Scenario(kind, heat_TLE, 32, 9, 128)


def untuned(seed: int, layers: int, windows: int = 12) -> Iterator[Scenario]:
    """Yield the kinds in ``UNTUNED``, in the same shape as ``generated``."""
    for kind in UNTUNED:
        yield Scenario(
            f"{kind} (untuned)", _drawn(kind, layers, 256, 128 * windows, seed + _UNTUNED_SEED), 32, 9, 128
        )


def _drawn(kind: str, layers: int, experts: int, steps: int, seed: int) -> Int32:
    """Draw heat of one kind in ``UNTUNED``, with 4,096 tokens x 8 choices per step.

    - *turnover*: popularity is gamma distributed (shape 0.5). In one step of 30, one of the 16 most popular experts
      swaps its popularity with a random expert.
    - *seasonal*: the log-popularity of each expert is a sine wave. Each expert has its own phase, amplitude and
      period (150 to 1,500 steps).
    """
    heat_TLE = np.empty((steps, layers, experts), dtype=np.int32)
    for layer in range(layers):
        generator = np.random.default_rng([seed, layer, UNTUNED.index(kind)])
        if kind == "turnover":
            share_E = generator.gamma(0.5, size=experts) + 1e-3
            share_TE = np.empty((steps, experts))
            for step in range(steps):
                if generator.random() < 1 / 30:
                    hot = generator.choice(np.argsort(share_E)[-16:])
                    swapped = generator.integers(experts)
                    share_E[[hot, swapped]] = share_E[[swapped, hot]]
                share_TE[step] = share_E
        else:
            period_E = generator.uniform(150, 1500, experts)
            phase_E = generator.uniform(0, 2 * np.pi, experts)
            angle_TE = 2 * np.pi * np.arange(steps)[:, None] / period_E + phase_E
            share_TE = np.exp(generator.gamma(2.0, 0.5, experts) * np.sin(angle_TE))
        share_TE /= share_TE.sum(axis=1, keepdims=True)
        share_TE = np.minimum(share_TE, 1 / 8)
        share_TE /= share_TE.sum(axis=1, keepdims=True)
        heat_TLE[:, layer] = generator.multinomial(4096 * 8, share_TE)
    return heat_TLE


def shipped() -> Scenario:
    """Return the shipped recording's heat as a scenario."""
    return Scenario("byte-moe decode (shipped)", np.load(SHIPPED)["heat"].astype(np.int32), 8, 5, 64)


def recorded(folder: Path, seed: int) -> Iterator[Scenario]:
    """Yield the recorded routing of every model in the directory."""
    steps = folder / "gpt-oss-20b" / "decode_steps_b64.npz"
    if steps.exists():
        heat_TLE = np.load(steps)["counts"][:, ::2].astype(np.int32)
        heat_TLE = np.ascontiguousarray(heat_TLE[: len(heat_TLE) // 64 * 64])
        yield Scenario("gpt-oss decode", heat_TLE, 8, 5, 64)
    for model, experts, tokens, ranks, slots in (
        ("deepseek-v2-lite-esft", 64, 640, 8, 10),
        ("gpt-oss-20b", 32, 1024, 8, 5),
    ):
        if (folder / model / "routes.npz").exists():
            heat_TLE = _sequence(folder / model, experts, tokens, seed)
            yield Scenario(f"{model} workloads", heat_TLE, ranks, slots, PHASE // 2)


def _sequence(folder: Path, experts: int, tokens: int, seed: int) -> Int32:
    """Concatenate eight workloads. Each step draws its tokens from the current workload's requests."""
    with np.load(folder / "routes.npz") as arrays:
        routes_NLK = arrays["routes"]
        bounds = arrays["req_ptr"]
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
