"""A policy that is of no use but to show how one is written: every rank takes over its neighbour's experts."""

import numpy as np


def rotated(heat_TLE, phy2log_LRS):  # noqa: ARG001
    """The placement, one rank further each time; int ``[L, R, S]``."""
    return np.roll(phy2log_LRS, 1, axis=1)
