"""Placements that tests draw."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplb_service.placement import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any shape that can be placed, with its experts shuffled per layer."""
    ranks = draw(st.integers(1, 6))
    slots = draw(st.integers(1, 5))
    experts = draw(st.integers(slots, ranks * slots))
    layers = draw(st.integers(1, 3))
    linear = Placement.linear(layers, experts, ranks, slots)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shuffled = np.stack([rng.permutation(experts)[row] for row in linear.phy2log_LRS])
    return Placement(shuffled.astype(np.int32), experts)
