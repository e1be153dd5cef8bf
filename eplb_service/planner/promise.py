"""What a decision promises of the steps that it will serve: each layer's ratio per step, and how it scatters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.placement import Float64
from eplb_service.solver.significance import inflation, inflation_error

_FEWEST_STEPS = 32
"""Steps below which nothing is learned of how neighbouring steps resemble each other."""


@dataclass(frozen=True)
class Promise:
    """The ratio per step that is expected of each layer, and of the mean over the layers, its last entry.

    Parameters
    ----------
    mean_C, variance_C
        float64 ``[L + 1]``, of one step; NaN for a layer without tokens.
    inflation_C
        float64 ``[L + 1]``, how much more a mean over steps in a row scatters than one over independent steps; 1 where
        too few were seen.
    steps
        Steps that it was made from.
    held_out
        Whether the mean allows for what a placement does worse on steps that it was not fitted to.
    """

    mean_C: Float64
    variance_C: Float64
    inflation_C: Float64
    steps: int
    held_out: bool = True


def promise_of(par_TL: Float64, optimism_L: Float64, *, held_out: bool) -> Promise:
    """The promise of what serves these steps so.

    Parameters
    ----------
    par_TL
        float64 ``[T, L]``, the ratio of each step of the window under what will serve; NaN without tokens.
    optimism_L
        float64 ``[L]``, how much worse fitted placements do on steps that they were not fitted to.
    held_out
        Whether that is known.
    """
    par_TC = channels_of(par_TL + optimism_L)
    known_TC = ~np.isnan(par_TC)
    count_C = known_TC.sum(axis=0)
    filled_TC = np.where(known_TC, par_TC, 0.0)
    mean_C = np.full(par_TC.shape[1], np.nan)
    np.divide(filled_TC.sum(axis=0), count_C, out=mean_C, where=count_C > 0)
    centred_TC = np.where(known_TC, par_TC - mean_C, 0.0)
    variance_C = (centred_TC**2).sum(axis=0) / np.maximum(count_C - 1, 1)
    inflation_C = np.ones_like(mean_C)
    if len(par_TC) >= _FEWEST_STEPS:
        # What independent steps would show by chance is taken off, or a change would be looked for too bluntly.
        chance = inflation_error(len(par_TC))
        inflation_C = np.maximum(1.0, inflation(centred_TC) - chance)
    return Promise(mean_C, variance_C, inflation_C, len(par_TC), held_out)


def no_promise(layers: int) -> Promise:
    """Nothing is known of what serves: all must be learned from its steps."""
    return Promise(np.full(layers + 1, np.nan), np.zeros(layers + 1), np.ones(layers + 1), 0, held_out=False)


def channels_of(par_TL: Float64) -> Float64:
    """Ratios of the layers and, last, of their mean, float64 ``[T, L + 1]``; NaN where there are no tokens."""
    known_TL = ~np.isnan(par_TL)
    count_T = known_TL.sum(axis=1)
    mean_T = np.full(len(par_TL), np.nan)
    np.divide(np.where(known_TL, par_TL, 0.0).sum(axis=1), count_T, out=mean_T, where=count_T > 0)
    channels_TC: Float64 = np.column_stack([par_TL, mean_T])
    return channels_TC
