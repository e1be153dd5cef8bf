"""A smooth stand-in for the maximum: the hottest rank counts most, those close behind it count too.

A search on the maximum alone leaves many ranks just below it, and the next window pushes one of them over. So a
rank's risk x presses with ((x - base) / (peak - base))**8 where it lies above the base, and a step must lower the
sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Bool, Float32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import risk
from eplb_service.solver.packing import Packing

_BELOW_MEAN = 12.0
"""The base lies this many times as far below the mean risk as the peak lies above it. The farther, the more the ranks
behind the hottest count, and the better what little is moved holds where heat drifts."""


class Pressure(NamedTuple):
    """Pressures of all ranks, and the scale that they are taken on."""

    base: float
    scale: float
    """1 / (peak - base)."""
    peak: float
    """The highest risk."""
    of_R: Float32
    """float32 ``[R]``; 1 for the hottest rank, 0 at the base."""


@kernel
def pressure(x: float, base: float, scale: float) -> float:
    """Pressure of one rank at risk ``x``."""
    relative = max((x - base) * scale, np.float32(0.0))
    squared = relative * relative
    fourth = squared * squared
    found: float = fourth * fourth
    return found


@kernel
def pressures(packing: Packing, z: float) -> Pressure:
    """Pressures on the scale of the ranks' risks now."""
    ranks = packing.load_R.shape[0]
    risk_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        risk_R[r] = risk(packing.load_R[r], packing.variance_R[r], z)
    peak, mean = risk_R.max(), risk_R.mean()
    base = np.float32(mean - np.float32(_BELOW_MEAN) * (peak - mean))
    scale = np.float32(1.0) / max(peak - base, np.float32(1e-6))
    of_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        of_R[r] = pressure(risk_R[r], base, scale)
    return Pressure(base, scale, peak, of_R)


@kernel
def hottest_of(now: Pressure, stuck_R: Bool) -> int:
    """The rank under the highest pressure that is not stuck; -1 where all are."""
    hot = -1
    for r in range(now.of_R.shape[0]):
        if not stuck_R[r] and (hot < 0 or now.of_R[r] > now.of_R[hot]):
            hot = r
    return hot


@kernel
def smooth_peak(now: Pressure) -> float:
    """The smooth maximum, on the scale of risks: base + 8-norm of what lies above it."""
    total = now.of_R.sum()
    found: float = now.base + total**0.125 / now.scale
    return found
