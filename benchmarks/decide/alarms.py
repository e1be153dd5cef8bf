"""False alarms on stationary heat, and the delay until a change in one layer's PAR raises an alarm."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.placement import Float64
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import promise_of_steps

_WINDOW_STEPS = 64
_SEGMENT_STEPS = 1000
_LAYERS = 24


class Alarms(NamedTuple):
    """Result of the alarm test.

    Parameters
    ----------
    false
        Number of false alarms.
    steps
        Number of stationary steps that were checked for alarms.
    delays
        Number of steps from each change to its alarm, or infinity if there was no alarm.
    """

    false: int
    steps: int
    delays: list[float]


def measured(ranks: int, choices: int, seed: int, stretches: int = 60, changes: int = 100) -> Alarms:
    """Count false alarms and measure alarm delays on layers that are balanced on average.

    Each step draws ``choices`` tokens. To measure the delay, one layer's PAR is raised by a fifth.

    Parameters
    ----------
    ranks
        Number of ranks.
    choices
        Number of tokens drawn per step and layer.
    seed
        Seed for the random draws.
    stretches
        Number of stationary segments of 1,000 steps that are searched for false alarms.
    changes
        Number of changes whose delay is measured.
    """
    generator = np.random.default_rng(seed)
    false = 0
    for _ in range(stretches):
        par_TL = served(generator, _WINDOW_STEPS + _SEGMENT_STEPS, ranks, choices)
        false += _promised_pace(par_TL).after_steps(par_TL[_WINDOW_STEPS:])[0].alarm is not None
    delays = []
    for _ in range(changes):
        par_TL = served(generator, _WINDOW_STEPS + 64, ranks, choices)
        par_TL[_WINDOW_STEPS:, 5] *= 1.2
        pace, steps_used = _promised_pace(par_TL).after_steps(par_TL[_WINDOW_STEPS:])
        delays.append(float(steps_used) if pace.alarm is not None else np.inf)
    return Alarms(false, stretches * _SEGMENT_STEPS, delays)


def _promised_pace(par_TL: Float64) -> Pace:
    promise = promise_of_steps(par_TL[:_WINDOW_STEPS], held_out=True)
    return Pace(first=0, memory=_WINDOW_STEPS, longest=_WINDOW_STEPS, due_at=1 << 40).serving(promise)


def served(generator: np.random.Generator, steps: int, ranks: int, choices: int) -> Float64:
    """Draw the PAR in each step and layer, ``[T, L]``, for ranks whose expected loads differ by at most a tenth."""
    shares_LR = 1.0 + 0.1 * generator.random((_LAYERS, ranks))
    shares_LR /= shares_LR.sum(axis=1, keepdims=True)
    loads_TLR = np.stack([generator.multinomial(choices, row_R, size=steps) for row_R in shares_LR], axis=1)
    par_TL: Float64 = loads_TLR.max(axis=2) / (choices / ranks)
    return par_TL
