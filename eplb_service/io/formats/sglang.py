"""Reader for dumps from SGLang's expert distribution recorder.

In ``stat`` mode, the recorder dumps ``logical_count`` ``[buffer, layers, experts]``, summed over the ranks. It is a
copy of the ring buffer in memory: rows that were never written are zero, and once the buffer has wrapped around, the
newest rows come before the oldest.

In ``per_pass`` and ``per_token`` modes, it writes one file per rank with ``records``, one per forward pass. Each rank
counts only its own tokens, so the reader sums each pass over the ranks.

In all modes, ``layers`` includes the dense layers of the model, whose counts are zero.

References
----------
``sglang/srt/eplb/expert_distribution.py`` (``_StatAccumulator``, ``_DetailAccumulator``, ``_CircularBuffer``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eplb_core.heat.window import HeatError
from eplb_service.io.containers import Array, as_array, counts_of, whole_number
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.routes import heat_of_slots
from eplb_service.io.trace import PHASES, ArrayTrace, Int64, TraceFacts

RANK_FILE = r".+_(?P<rank>\d+)\.(pt|json)"
"""Pattern for the name of a file with the tokens of one rank."""
_MAP = "last_physical_to_logical_map"
_MIXED = PHASES.index("mixed")
_MODES = {1: PHASES.index("prefill"), 2: PHASES.index("decode"), 3: _MIXED}
"""Phase of each of SGLang's forward modes. With other modes, such as idle, the phase of a step is unknown."""


@dataclass
class _Pass:
    """One forward pass: tokens by slot, ``[L, P]``, for each rank and gatherer, plus the total tokens and phases."""

    counts: dict[tuple[int, str], Array] = field(default_factory=dict)
    tokens: int = 0
    phases: set[int] = field(default_factory=set)

    @property
    def phase(self) -> int:
        """Index of the pass's phase in ``PHASES``. A pass is mixed if its ranks' phases differ."""
        return _MIXED if len(self.phases) > 1 else next(iter(self.phases), 0)


def is_dump(document: object) -> bool:
    """Return True if a document is a dump with records of forward passes."""
    return isinstance(document, Mapping) and isinstance(document.get("records"), list)


def trace_of_dumps(dumps: Sequence[tuple[str, Mapping[Any, Any]]], read_as: ReadAs) -> ArrayTrace:
    """Build the trace from the dumps of all ranks of a run.

    Passes that some ranks did not record are left out, and the trace's origin gives their number.

    Parameters
    ----------
    dumps
        Pairs of a file's name and its document.
    read_as
        Facts that the user provides. A map from the user overrides those in the dumps.

    Raises
    ------
    HeatError
        If the dumps are inconsistent or come from different runs.
    """
    read_as.refuse_unused("a dump of SGLang's recorder", "phy2log", "experts")
    phy2log = read_as.phy2log
    passes: defaultdict[int, _Pass] = defaultdict(_Pass)
    for name, dump in dumps:
        map_of_dump = None if read_as.phy2log is not None else as_array(dump.get(_MAP))
        if phy2log is not None and map_of_dump is not None and not np.array_equal(phy2log, map_of_dump):
            raise HeatError(
                f"{name}: its {_MAP} differs from that of the other files; the dumps are not from the same run"
            )
        phy2log = phy2log if map_of_dump is None else map_of_dump
        for position, record in enumerate(dump["records"]):
            _add(passes, record, position, f"{name}: record {position}", phy2log)
    shapes = {counts_LP.shape for forward in passes.values() for counts_LP in forward.counts.values()}
    if len(shapes) > 1:
        raise HeatError(
            f"the shapes of the records differ: {', '.join(str(list(shape)) for shape in sorted(shapes))}"
        )
    ranks = {rank for forward in passes.values() for rank, _ in forward.counts}
    complete = [
        passes[number] for number in sorted(passes) if {rank for rank, _ in passes[number].counts} == ranks
    ]
    if not complete:
        raise HeatError(f"has no forward pass that all {len(ranks)} ranks recorded")
    if phy2log is None:
        raise HeatError(f"has tokens by slot but no {_MAP}; pass the expert in each slot with --map")
    counts_TLP = np.stack(
        [sum(forward.counts.values(), start=np.zeros((), dtype=np.int64)) for forward in complete]
    )
    heat_TLE = heat_of_slots(counts_TLP, read_as.map_of(counts_TLP, phy2log), read_as.experts)
    by_token = any("topk_ids_of_layer" in record for _, dump in dumps for record in dump["records"])
    origin = f"SGLang recorder, per {'token' if by_token else 'pass'}, {len(ranks)} ranks"
    if len(complete) < len(passes):
        origin += f", {len(passes) - len(complete)} passes not recorded by all ranks left out"
    busy, moe, facts = _busy_steps_and_layers(heat_TLE, origin)
    tokens_T = np.array([forward.tokens for forward in complete], dtype=np.int64)[busy]
    phase_T = np.array([forward.phase for forward in complete], dtype=np.int64)[busy]
    return ArrayTrace(
        heat_TLE[np.ix_(busy, moe)],
        replace(facts, phases=PHASES),
        tokens_T if tokens_T.all() else None,
        phase_T=phase_T,
    )


def _add(
    passes: defaultdict[int, _Pass], record: object, position: int, location: str, phy2log: Array | None
) -> None:
    """Add a record to its forward pass.

    Parameters
    ----------
    passes
        Forward passes, keyed by number.
    record
        Record in a dump.
    position
        Index of the record in its dump, which is the number of the pass if the record has none.
    location
        Location of the record, for error messages.
    phy2log
        Expert in each slot, or ``None`` if it is unknown.
    """
    if not isinstance(record, Mapping):
        raise HeatError(f"{location} is not a record of a forward pass")
    content = {"forward_pass_id": position, "rank": 0, **record}
    number = whole_number(content, "forward_pass_id", location)
    rank = whole_number(content, "rank", location)
    recorder = rank, str(record.get("gatherer_key", ""))
    if recorder in passes[number].counts:
        raise HeatError(
            f"{location}: rank {rank} recorded forward pass {number} twice; the files may be from different runs"
        )
    passes[number].counts[recorder] = _counts(record, location, phy2log)
    passes[number].tokens += len(record["input_ids"]) if isinstance(record.get("input_ids"), list) else 0
    mode = record.get("forward_mode")
    if isinstance(mode, int) and mode in _MODES:
        passes[number].phases.add(_MODES[mode])


def _counts(record: Mapping[Any, Any], location: str, phy2log: Array | None) -> Array:
    """Return a record's tokens by slot, ``[L, P]``, counted from its tokens' choices if the record has no counts."""
    counts = record.get("global_physical_count")
    choices = record.get("topk_ids_of_layer")
    if counts is not None or choices is None or phy2log is None:
        return counts_of(counts, "global_physical_count", location, ("layers", "slots"))
    slots = phy2log.reshape(len(phy2log), -1).shape[-1]
    # The rows of tokens with fewer choices are padded with -1.
    axes = ("layers", "tokens", "choices")
    choices_LKC = counts_of(choices, "topk_ids_of_layer", location, axes, minimum=-1, maximum=slots - 1)
    return np.stack([np.bincount(chosen_KC[chosen_KC >= 0], minlength=slots) for chosen_KC in choices_LKC])


def trace_of_ring_buffer(counts_TLE: Array, origin: str, read_as: ReadAs) -> ArrayTrace:
    """Build the trace from a dump in ``stat`` mode.

    Rows without tokens are not steps, and layers without tokens are dense, so both are left out. If every row is in
    use, the buffer may have wrapped around at an unknown row. The trace's origin then says that the steps may be out of
    order.

    Parameters
    ----------
    counts_TLE
        Tokens by logical expert, ``[buffer, layers, experts]``.
    origin
        Format of the file.
    read_as
        Facts that the user provides.

    Raises
    ------
    HeatError
        If all counts are zero, or a count is invalid.
    """
    read_as.refuse_unused("a dump of SGLang's recorder", "experts")
    checked = ArrayTrace(counts_TLE).heat(0, len(counts_TLE))
    full = checked.any(axis=(1, 2)).all() and len(checked) > 1
    origin += ", ring buffer full: the oldest step may not come first" if full else ""
    busy, moe, facts = _busy_steps_and_layers(checked, f"SGLang recorder ({origin})")
    return ArrayTrace(checked[np.ix_(busy, moe)], facts)


def _busy_steps_and_layers(heat_TLE: Array, origin: str) -> tuple[Int64, Int64, TraceFacts]:
    """Return the indices of the steps and of the layers with tokens, and facts that mention the omitted ones."""
    tokens_TL = heat_TLE.sum(axis=2)
    busy = np.flatnonzero(tokens_TL.any(axis=1))
    moe = np.flatnonzero(tokens_TL.any(axis=0))
    if not busy.size:
        raise HeatError("has no forward pass, because all counts are zero; record while the model is serving")
    empty = len(heat_TLE) - busy.size
    dense = heat_TLE.shape[1] - moe.size
    origin += f", {empty} rows left out (no tokens)" if empty else ""
    origin += f", {dense} dense layers left out" if dense else ""
    return busy, moe, TraceFacts(origin, layer_numbers=tuple(moe.tolist()) if dense else ())
