"""Dictionaries that recorders save, in ``.pt`` or ``.json``: SGLang's dumps, and arrays under telling names."""

from __future__ import annotations

from collections.abc import Mapping

from eplb_service.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs, as_array, trace_of_arrays
from eplb_service.io.sglang import is_dump, trace_of_dumps
from eplb_service.io.trace import ArrayTrace


def trace_of_document(document: object, origin: str, read_as: ReadAs) -> ArrayTrace:
    """The trace in what a recorder saved.

    Known are SGLang's recorder dumps (``logical_count``, or ``records`` of forward passes), dictionaries of arrays
    named as in ``trace_of_arrays``, and a bare array. Raises ``HeatError`` on anything else.
    """
    bare = as_array(document)
    if bare is not None:
        return trace_of_arrays({"": bare}, origin, read_as)
    if isinstance(document, list) and not any(isinstance(entry, dict) for entry in document):
        raise HeatError("holds a list whose rows differ in length or are no numbers; expected a full array")
    if not isinstance(document, Mapping):
        raise HeatError(f"holds a {type(document).__name__}; expected an array, or a dictionary with one")
    if is_dump(document):
        return trace_of_dumps([(origin, document)], read_as)
    if "logical_count" in document:
        origin = f"SGLang recorder ({origin})"
    arrays = {str(name): array for name, value in document.items() if (array := as_array(value)) is not None}
    if not arrays:
        raise HeatError(f"holds no array; found {', '.join(map(str, list(document)[:8])) or 'nothing'}")
    return trace_of_arrays(arrays, origin, read_as)
