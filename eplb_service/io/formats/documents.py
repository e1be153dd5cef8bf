"""What a recorder saved, as JSON, JSON Lines or torch file: a table of the known forms, and how each is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.json_lines import Record, records_of
from eplb_service.io.formats import megatron, responses, vllm_load
from eplb_service.io.formats.load_history import trace_of_history
from eplb_service.io.formats.sglang import check_alone, is_dump, trace_of_dumps, trace_of_ring_buffer
from eplb_service.io.named_arrays import ReadAs, as_array, trace_of_arrays
from eplb_service.io.trace import ArrayTrace


class RecordFormat(NamedTuple):
    """One form of records: whether one is of it, and the trace that many are."""

    is_record: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Iterable[Record], ReadAs], ArrayTrace]


RECORD_FORMATS = (
    RecordFormat(vllm_load.is_record, vllm_load.trace_of_records),
    RecordFormat(megatron.is_record, megatron.trace_of_records),
    RecordFormat(responses.is_record, responses.trace_of_records),
)


def trace_of_lines(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace in records of one of ``RECORD_FORMATS``, as the first one shows; raises ``HeatError``."""
    remaining = iter(records)
    first = next(remaining, None)
    if first is None:
        raise HeatError("holds no records")
    known = record_format(first.content)
    if known is None:
        found = ", ".join(map(str, list(first.content)[:8])) or "nothing"
        raise HeatError(f"{first.place} is no record that is known; found {found}")
    return known.read(itertools.chain([first], remaining), read_as)


def record_format(content: Mapping[str, Any]) -> RecordFormat | None:
    """The form that a record is of; ``None`` where it is none."""
    return next((form for form in RECORD_FORMATS if form.is_record(content)), None)


def trace_of_document(document: object, origin: str, read_as: ReadAs, path: Path) -> ArrayTrace:
    """The trace in a whole document.

    Known are SGLang's recorder dumps (``logical_count``, or ``records`` of forward passes), the ``load_history`` of
    OpenEvolve's and ADRS' benchmark, records of ``RECORD_FORMATS``, one or a list of them, dictionaries of arrays named
    as in ``trace_of_arrays``, and a bare array. Raises ``HeatError`` on anything else.
    """
    bare = as_array(document)
    if bare is not None:
        return trace_of_arrays({"": bare}, origin, read_as, path.stem)
    if isinstance(document, list) and any(isinstance(entry, Mapping) for entry in document):
        return trace_of_lines(records_of(document), read_as)
    if isinstance(document, list):
        raise HeatError("holds a list whose rows differ in length or are no numbers; expected a full array")
    if isinstance(document, tuple) and document and as_array(document[0]) is not None:
        raise HeatError(
            "holds several arrays without names, as a placement of DeepSeek's EPLB: --map and --placement take "
            "that; heat is one array"
        )
    if not isinstance(document, Mapping):
        raise HeatError(f"holds a {type(document).__name__}; expected an array, or a dictionary with one")
    if "load_history" in document:
        return trace_of_history(document["load_history"], origin)
    if is_dump(document):
        check_alone(path)
        return trace_of_dumps([(origin, document)], read_as)
    if record_format(document) is not None:
        return trace_of_lines(records_of([document]), read_as)
    counts_TLE = as_array(document["logical_count"]) if "logical_count" in document else None
    if counts_TLE is not None and counts_TLE.ndim == 3 and read_as.meaning in (None, "heat"):
        return trace_of_ring_buffer(counts_TLE, origin)
    arrays = {str(name): array for name, value in document.items() if (array := as_array(value)) is not None}
    if not arrays:
        raise HeatError(f"holds no array; found {', '.join(map(str, list(document)[:8])) or 'nothing'}")
    return trace_of_arrays(arrays, origin, read_as)
