"""The benchmark's own scorer: the slowest rank's time by the definition, sharing no code with the solver."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve

Float64 = npt.NDArray[np.float64]


def slowest_us(
    heat_TLE: npt.NDArray[np.integer],
    phy2log_LRS: npt.NDArray[np.integer],
    log2phy_RLE: npt.NDArray[np.integer],
    curve: CostCurve,
) -> Float64:
    """Microseconds of each layer's slowest rank in each step, float64 ``[T, L]``; sources send alike."""
    layers, ranks, slots = phy2log_LRS.shape
    us_TL = np.empty((len(heat_TLE), layers))
    for layer in range(layers):
        sources_P = np.zeros(ranks * slots)
        for table_E in log2phy_RLE[:, layer]:
            np.add.at(sources_P, table_E, 1.0)
        tokens_TP = heat_TLE[:, layer, phy2log_LRS[layer].ravel()] * (sources_P / len(log2phy_RLE))
        busy_TP = tokens_TP > 0
        cost_TP = np.where(
            busy_TP, np.maximum(curve.read_us, curve.launch_us + curve.slope_us * tokens_TP), 0.0
        )
        us_TL[:, layer] = curve.floor_us + cost_TP.reshape(-1, ranks, slots).sum(axis=2).max(axis=1)
    return us_TL
