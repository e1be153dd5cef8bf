"""The ``expert-load.json`` of the EPLB benchmark of OpenEvolve and ADRS: vLLM's load, one entry per recorded step.

References
----------
``{"load_history": [{"logical_expert_load": [[...]]}, ...]}``, as ``load_workloads`` of its ``evaluator.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.named_arrays import as_array
from eplb_service.io.trace import ArrayTrace, TraceFacts

_LOAD = "logical_expert_load"


def trace_of_history(history: object, origin: str) -> ArrayTrace:
    """The trace in a history of loads; raises ``HeatError`` (without the path) naming the entry that is none."""
    if not isinstance(history, list) or not history:
        raise HeatError("load_history holds no list of entries")
    heat: list[Array] = []
    for number, entry in enumerate(history):
        load_LE = as_array(entry.get(_LOAD)) if isinstance(entry, Mapping) else None
        if load_LE is None or load_LE.ndim != 2:
            raise HeatError(f"entry {number} of load_history holds no {_LOAD} [layers, experts]")
        if heat and load_LE.shape != heat[0].shape:
            raise HeatError(
                f"entry {number} of load_history is {list(load_LE.shape)}, the first {list(heat[0].shape)}"
            )
        heat.append(load_LE)
    return ArrayTrace(np.stack(heat), TraceFacts(origin=f"{origin}, a history of loads by logical expert"))
