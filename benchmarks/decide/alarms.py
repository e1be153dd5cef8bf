"""False alarms on still heat, and how soon a change of one layer's ratio is found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.placement import Float64
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import promise_of

_SEEN = 64
_STRETCH = 1000
_LAYERS = 24


class Alarms(NamedTuple):
    """What the test did: false alarms in so many steps, and the delays of the changes found (infinite where not)."""

    false: int
    steps: int
    delays: list[float]


def measured(ranks: int, choices: int, seed: int, stretches: int = 60, changes: int = 100) -> Alarms:
    """Layers balanced in the mean, ``choices`` tokens drawn in each step; one layer's ratio then rises by a fifth."""
    generator = np.random.default_rng(seed)
    false = 0
    for _ in range(stretches):
        par_TL = served(generator, _SEEN + _STRETCH, ranks, choices)
        false += _promised(par_TL).after_steps(par_TL[_SEEN:])[0].alarm is not None
    delays = []
    for _ in range(changes):
        par_TL = served(generator, _SEEN + 64, ranks, choices)
        par_TL[_SEEN:, 5] *= 1.2
        pace, taken = _promised(par_TL).after_steps(par_TL[_SEEN:])
        delays.append(float(taken) if pace.alarm is not None else np.inf)
    return Alarms(false, stretches * _STRETCH, delays)


def _promised(par_TL: Float64) -> Pace:
    promise = promise_of(par_TL[:_SEEN], held_out=True)
    return Pace(first=0, memory=_SEEN, longest=_SEEN, due_at=1 << 40).serving(promise)


def served(generator: np.random.Generator, steps: int, ranks: int, choices: int) -> Float64:
    """Ratios of ranks that are balanced in the mean, each with a share of its own, and tokens drawn."""
    shares_LR = 1.0 + 0.1 * generator.random((_LAYERS, ranks))
    shares_LR /= shares_LR.sum(axis=1, keepdims=True)
    loads_TLR = np.stack([generator.multinomial(choices, row_R, size=steps) for row_R in shares_LR], axis=1)
    par_TL: Float64 = loads_TLR.max(axis=2) / (choices / ranks)
    return par_TL
