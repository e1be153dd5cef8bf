"""Heat that tests write in every format, and helpers for slots and errors."""

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_service.io.open_trace import read_heat

HEAT_TLE = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
PHY2LOG_LP = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2], [0, 0, 1, 2, 3, 3]])


def by_expert(slots_TLP, phy2log_LP, experts):
    """Sum the tokens by expert in a plain loop, and return them, int64 ``[T, L, E]``."""
    heat_TLE = np.zeros((*np.shape(slots_TLP)[:2], experts), dtype=np.int64)
    for (step, layer, slot), tokens in np.ndenumerate(slots_TLP):
        heat_TLE[step, layer, phy2log_LP[layer, slot]] += tokens
    return heat_TLE


def slots_of(heat_TLE, phy2log_LP):
    """Return tokens by slot that sum to ``heat_TLE``.

    Each earlier replica gets a third of the tokens, and the last replica gets the rest.
    """
    slots_TLP = np.zeros((len(heat_TLE), *phy2log_LP.shape), dtype=np.int32)
    for layer, phy2log_P in enumerate(phy2log_LP):
        for expert in range(heat_TLE.shape[2]):
            *earlier, last = np.flatnonzero(phy2log_P == expert)
            for slot in earlier:
                slots_TLP[:, layer, slot] = heat_TLE[:, layer, expert] // 3
            rest_T = heat_TLE[:, layer, expert] - slots_TLP[:, layer, earlier].sum(axis=1)
            slots_TLP[:, layer, last] = rest_T
    return slots_TLP


def refusal(path, read_as=None):
    with pytest.raises(HeatError) as caught:
        read_heat(path, read_as)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message
