"""Dictionaries that recorders save, in ``.pt`` or ``.json``: SGLang's dumps, and arrays under telling names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eplb_service.heat.numpy_file import Array
from eplb_service.heat.window import HeatError
from eplb_service.traces.arrays import ReadAs, as_array, trace_of_arrays
from eplb_service.traces.physical import heat_of_slots
from eplb_service.traces.trace import ArrayTrace, TraceFacts


def trace_of_document(document: object, origin: str, read_as: ReadAs) -> ArrayTrace:
    """The trace in what a recorder saved.

    Known are SGLang's recorder dumps (``logical_count``, or ``records`` with ``global_physical_count`` and
    ``last_physical_to_logical_map``), dictionaries of arrays named as in ``trace_of_arrays``, and a bare array.
    Raises ``HeatError`` on anything else.
    """
    bare = as_array(document)
    if bare is not None:
        return trace_of_arrays({"": bare}, origin, read_as)
    if isinstance(document, list) and not any(isinstance(entry, dict) for entry in document):
        raise HeatError("holds a list whose rows differ in length or are no numbers; expected a full array")
    if not isinstance(document, Mapping):
        raise HeatError(f"holds a {type(document).__name__}; expected an array, or a dictionary with one")
    if "records" in document:
        return _from_passes(document, read_as)
    if "logical_count" in document:
        origin = f"SGLang recorder ({origin})"
    arrays = {str(name): array for name, value in document.items() if (array := as_array(value)) is not None}
    if not arrays:
        raise HeatError(f"holds no array; found {', '.join(map(str, list(document)[:8])) or 'nothing'}")
    return trace_of_arrays(arrays, origin, read_as)


def _from_passes(document: Mapping[Any, Any], read_as: ReadAs) -> ArrayTrace:
    """SGLang's per-pass dump: one record a forward pass and rank, each with what the rank's slots received."""
    records = document["records"]
    if not isinstance(records, list) or not records:
        raise HeatError("holds no records of forward passes")
    sums: dict[int, Array] = {}
    for position, record in enumerate(records):
        counts_LP = as_array(record.get("global_physical_count")) if isinstance(record, Mapping) else None
        if counts_LP is None or counts_LP.ndim != 2:
            raise HeatError(f"record {position} has no global_physical_count [layers, slots]")
        number = record.get("forward_pass_id", position)
        if not isinstance(number, int):
            raise HeatError(f"record {position} numbers its forward pass {number!r}")
        if number in sums and sums[number].shape != counts_LP.shape:
            raise HeatError(
                f"record {position} has the shape {list(counts_LP.shape)}, others {list(sums[number].shape)}"
            )
        sums[number] = sums[number] + counts_LP if number in sums else counts_LP
    shapes = {counts_LP.shape for counts_LP in sums.values()}
    if len(shapes) > 1:
        raise HeatError(
            f"records have several shapes: {', '.join(str(list(shape)) for shape in sorted(shapes))}"
        )
    phy2log = read_as.phy2log
    if phy2log is None:
        phy2log = as_array(document.get("last_physical_to_logical_map"))
    if phy2log is None:
        raise HeatError("holds tokens by slot without last_physical_to_logical_map; give it with --map")
    slot_heat_TLP = np.stack([sums[number] for number in sorted(sums)])
    facts = TraceFacts(origin="SGLang recorder, per pass")
    return ArrayTrace(heat_of_slots(slot_heat_TLP, phy2log, read_as.experts), facts)
