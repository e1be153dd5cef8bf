"""Random placements, and a plain twin of the dealing rule."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplb_core.placement import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draw a placement of any valid shape, with its experts shuffled per layer."""
    ranks = draw(st.integers(1, 6))
    slots = draw(st.integers(1, 5))
    experts = draw(st.integers(slots, ranks * slots))
    layers = draw(st.integers(1, 3))
    linear = Placement.linear(layers, experts, ranks, slots)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shuffled = np.stack([rng.permutation(experts)[row] for row in linear.phy2log_LRS])
    return Placement(shuffled.astype(np.int32), experts)


def dealt_one_by_one(source_TRLE: np.ndarray, log2phy_RLED: np.ndarray, slots: int) -> np.ndarray:
    """Return the tokens per slot, ``[T, L, P]``. Each token goes to the next entry of its source rank's table."""
    tables_RLED = log2phy_RLED.reshape(*log2phy_RLED.shape[:3], -1)
    slots_TLP = np.zeros((len(source_TRLE), source_TRLE.shape[2], slots), dtype=np.int64)
    for (step, source, layer, expert), tokens in np.ndenumerate(source_TRLE):
        for token in range(tokens):
            entry = token % tables_RLED.shape[3]
            slots_TLP[step, layer, tables_RLED[source, layer, expert, entry]] += 1
    return slots_TLP
