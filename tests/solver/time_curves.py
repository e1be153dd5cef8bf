"""Cost curves and kinds of heat for tests of placements that reduce time."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

CURVE = np.array([20.0, 11.6, 5.0, 0.0615])
CURVES = st.sampled_from(
    (CURVE, *(np.array(terms) for terms in ((0.0, 3, 3, 1), (5.0, 0, 0, 0.5), (1.0, 9, 0, 0))))
)
TIMED_KINDS = ("even", "skewed", "zero", "one hot", "sparse", "bursty", "alternating")
