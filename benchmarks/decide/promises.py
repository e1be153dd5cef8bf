"""Promises compared with the PAR that whole tokens realise on the next window, at 1 to 256 tokens per step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Int32, Placement, mean_par
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.plan import Layout
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.scoring import realised_par

TOKENS = (1, 4, 16, 64, 256)
BATCHES = (4, 8, 16, 64)
_WINDOWS = 5
_STEPS = 192
_DECODED = 128
"""Number of steps per window of recorded decode heat."""


@dataclass(frozen=True)
class Kept:
    """Promised and realised PAR for one scenario, averaged over its windows.

    Parameters
    ----------
    name
        Name of the heat, followed by "warm" if each decision starts from the current layout, or else "from scratch".
    seen
        PAR before the decision.
    promised
        PAR that the decision promises.
    realised
        PAR realised on the next window.
    off
        Mean absolute error of a window's promise, as a fraction of the realised PAR.
    moves
        Slots moved per window.
    """

    name: str
    seen: float
    promised: float
    realised: float
    off: float
    moves: float


def measured(seed: int, traces: Path | None) -> Iterator[Kept]:
    """Yield two rows for each token count: one for decisions from scratch and one for warm decisions."""
    scenarios = [Scenario(f"{tokens} tokens", routed(tokens, seed), 8, 10, _STEPS) for tokens in TOKENS]
    if traces is not None and (traces / "gpt-oss-20b" / "routes.npz").exists():
        for batch in BATCHES:
            heat_TLE = decoded(traces / "gpt-oss-20b", batch, _DECODED * (_WINDOWS + 1))
            scenarios.append(Scenario(f"gpt-oss decode, batch {batch}", heat_TLE, 8, 5, _DECODED))
    for scenario in scenarios:
        for warm in (False, True):
            yield _kept(scenario, warm)


def _kept(scenario: Scenario, warm: bool) -> Kept:
    """Decide on each window except the last, and score each decision on the window that follows."""
    settings = PlannerSettings(threads=1)
    topology = Topology.flat(scenario.ranks)
    linear = Placement.linear(*scenario.heat_TLE.shape[1:], scenario.ranks, scenario.slots)
    first = Layout(linear, linear.default_log2phy())
    current = first
    rows = []
    for number in range(scenario.decisions):
        window = Window(scenario.heat(number))
        if warm:
            decision = plan(window, current.placement, current.log2phy_RLE, topology, settings)
            current = current.changed_by(decision)
        else:
            decision = plan_from_scratch(window, linear, topology, settings, hold_out=True)
            current = first.changed_by(decision)
        realised = realised_par(scenario.served(number), scenario.slots, current.log2phy_RLE)
        rows.append((decision.par_seen, decision.par_planned, float(mean_par(realised)), decision.moves))
    seen, promised, realised, moves = np.array(rows).T
    start = "warm" if warm else "from scratch"
    error = float(np.abs(promised / realised - 1.0).mean())
    return Kept(
        f"{scenario.name}, {start}", seen.mean(), promised.mean(), realised.mean(), error, moves.mean()
    )


def routed(tokens: int, seed: int, layers: int = 4, experts: int = 64, choices: int = 4) -> Int32:
    """Draw heat from a router that chooses distinct experts for each token, with Zipf-distributed popularity."""
    generator = np.random.default_rng([seed, tokens])
    log_E = -0.8 * np.log(np.arange(1, experts + 1))
    heat_TLE = np.zeros((_STEPS * (_WINDOWS + 1), layers, experts), dtype=np.int32)
    for layer in range(layers):
        popularity_E = generator.permutation(log_E)
        for heat_LE in heat_TLE:
            score_NE = popularity_E + generator.gumbel(size=(tokens, experts))
            chosen_NK = np.argpartition(-score_NE, choices, axis=1)[:, :choices]
            heat_LE[layer] = np.bincount(chosen_NK.ravel(), minlength=experts)
    return heat_TLE


def decoded(folder: Path, batch: int, steps: int, experts: int = 32) -> Int32:
    """Return heat from decoding ``batch`` recorded requests at a time, in file order, for every fourth layer."""
    with np.load(folder / "routes.npz") as arrays:
        routes_NLK = arrays["routes"][:, ::4].astype(np.int64)
        bounds = arrays["req_ptr"].tolist()
    waiting = list(pairwise(bounds))[::-1]
    live: list[tuple[int, int]] = []
    heat_TLE = np.zeros((steps, routes_NLK.shape[1], experts), dtype=np.int32)
    for heat_LE in heat_TLE:
        live = [(token + 1, end) for token, end in live if token + 1 < end]
        while len(live) < batch and waiting:
            live.append(waiting.pop())
        for layer, layer_routes_NK in enumerate(routes_NLK[[token for token, _ in live]].transpose(1, 0, 2)):
            heat_LE[layer] = np.bincount(layer_routes_NK.ravel(), minlength=experts)
    return heat_TLE
