"""Slow twin of a step in whole tokens."""

from __future__ import annotations

import numpy as np


def draw(heat_E, expert_P, share_P, generator, table_RED=None, source_RE=None):
    """Draw each token's slot and return the counts, int64 ``[P]``.

    With dealing tables, draw the token's source first.
    """
    tokens_P = np.zeros(len(expert_P), dtype=np.int64)
    for expert, tokens in enumerate(heat_E):
        if table_RED is None:
            slots = np.flatnonzero(expert_P == expert)
            odds = share_P[slots] / share_P[slots].sum()
            for _ in range(int(tokens)):
                tokens_P[generator.choice(slots, p=odds)] += 1
            continue
        dealt_R = [0] * len(source_RE)
        for _ in range(int(tokens)):
            source = generator.choice(len(source_RE), p=source_RE[:, expert])
            table_D = table_RED[source, expert]
            tokens_P[table_D[dealt_R[source] % len(table_D)]] += 1
            dealt_R[source] += 1
    return tokens_P


def slowest_us(tokens_P, ranks, curve_4):
    floor, read, launch, slope = curve_4
    """Return the slowest rank's time, in microseconds."""
    tokens_RS = tokens_P.reshape(ranks, -1)
    return floor + max(
        sum(max(read, launch + slope * tokens) for tokens in row if tokens > 0) for row in tokens_RS
    )
