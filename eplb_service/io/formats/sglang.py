"""Dumps of SGLang's expert distribution recorder, as heat: its ring buffer, or single forward passes of each rank.

The mode ``stat`` dumps ``logical_count`` ``[buffer, layers, experts]``, summed over the ranks, the whole ring buffer as
it is in memory: rows that were never written are zeros, and once it has wrapped around the newest rows are in front of
the oldest. The modes ``per_pass`` and ``per_token`` write ``records``, one per forward pass and a file per rank, in
which each rank counts only its own tokens; the ranks' counts of a pass are summed. In all of them ``layers`` are all
layers of the model, dense ones included, whose counts are zero.

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
"""Name of a file that holds the share of one rank."""
_MAP = "last_physical_to_logical_map"
_MIXED = PHASES.index("mixed")
_MODES = {1: PHASES.index("prefill"), 2: PHASES.index("decode"), 3: _MIXED}
"""Phases by SGLang's numbers of forward modes; others, such as idle, leave a step's phase unknown."""


@dataclass
class _Pass:
    """One forward pass: tokens by slot ``[L, P]`` by rank and the rank's gatherer, tokens of all, phases."""

    counts: dict[tuple[int, str], Array] = field(default_factory=dict)
    tokens: int = 0
    phases: set[int] = field(default_factory=set)

    @property
    def phase(self) -> int:
        """Index into ``PHASES``."""
        return _MIXED if len(self.phases) > 1 else next(iter(self.phases), 0)


def is_dump(document: object) -> bool:
    """Return whether a file's content is such a dump."""
    return isinstance(document, Mapping) and isinstance(document.get("records"), list)


def trace_of_dumps(dumps: Sequence[tuple[str, Mapping[Any, Any]]], read_as: ReadAs) -> ArrayTrace:
    """The trace in the dumps of one run's ranks, each with the name of its file.

    A pass that not all ranks have recorded is left out, which the trace's origin says. Raises ``HeatError`` where
    the dumps contradict each other, or are not of one run.
    """
    read_as.refuse_unused("records of SGLang's recorder", "phy2log", "experts")
    phy2log = read_as.phy2log
    passes: defaultdict[int, _Pass] = defaultdict(_Pass)
    for name, dump in dumps:
        stated = None if read_as.phy2log is not None else as_array(dump.get(_MAP))
        if phy2log is not None and stated is not None and not np.array_equal(phy2log, stated):
            raise HeatError(f"{name}: has another {_MAP} than the others; these are not dumps of one run")
        phy2log = phy2log if stated is None else stated
        for position, record in enumerate(dump["records"]):
            _add(passes, record, position, f"{name}: record {position}", phy2log)
    shapes = {counts_LP.shape for one in passes.values() for counts_LP in one.counts.values()}
    if len(shapes) > 1:
        raise HeatError(
            f"records have several shapes: {', '.join(str(list(shape)) for shape in sorted(shapes))}"
        )
    ranks = {rank for one in passes.values() for rank, _ in one.counts}
    kept = [
        passes[number] for number in sorted(passes) if {rank for rank, _ in passes[number].counts} == ranks
    ]
    if not kept:
        raise HeatError(f"there is no forward pass that all of {len(ranks)} ranks have recorded")
    if phy2log is None:
        raise HeatError(f"holds tokens by slot without {_MAP}; give it with --map")
    counts_LP = [sum(one.counts.values(), start=np.zeros((), dtype=np.int64)) for one in kept]
    counts_TLP = np.stack(counts_LP)
    heat_TLE = heat_of_slots(counts_TLP, read_as.map_of(counts_TLP, phy2log), read_as.experts)
    by_token = any("topk_ids_of_layer" in record for _, dump in dumps for record in dump["records"])
    origin = f"SGLang recorder, per {'token' if by_token else 'pass'}, {len(ranks)} ranks"
    if len(kept) < len(passes):
        origin += f", {len(passes) - len(kept)} passes not recorded by all left out"
    busy, moe, facts = _busy_part(heat_TLE, origin)
    tokens_T = np.array([one.tokens for one in kept], dtype=np.int64)[busy]
    phase_T = np.array([one.phase for one in kept], dtype=np.int64)[busy]
    return ArrayTrace(
        heat_TLE[np.ix_(busy, moe)],
        replace(facts, phases=PHASES),
        tokens_T if tokens_T.all() else None,
        phase_T=phase_T,
    )


def _add(
    passes: defaultdict[int, _Pass], record: object, position: int, place: str, phy2log: Array | None
) -> None:
    """Add one record of a dump to the pass that it is of."""
    if not isinstance(record, Mapping):
        raise HeatError(f"{place} is no record of a forward pass")
    content = {"forward_pass_id": position, "rank": 0, **record}
    number, rank = (whole_number(content, name, place) for name in ("forward_pass_id", "rank"))
    who = rank, str(record.get("gatherer_key", ""))
    if who in passes[number].counts:
        raise HeatError(
            f"{place}: rank {rank} has recorded forward pass {number} twice; are these of one run?"
        )
    passes[number].counts[who] = _counts(record, place, phy2log)
    passes[number].tokens += len(record["input_ids"]) if isinstance(record.get("input_ids"), list) else 0
    mode = record.get("forward_mode")
    if isinstance(mode, int) and mode in _MODES:
        passes[number].phases.add(_MODES[mode])


def _counts(record: Mapping[Any, Any], place: str, phy2log: Array | None) -> Array:
    """Tokens by slot ``[L, P]`` of one record, counted from the choices of its tokens where it has no counts."""
    stated, choices = (record.get(name) for name in ("global_physical_count", "topk_ids_of_layer"))
    if stated is not None or choices is None or phy2log is None:
        return counts_of(stated, "global_physical_count", place, ("layers", "slots"))
    slots = phy2log.reshape(len(phy2log), -1).shape[-1]
    # -1 is where a token has no more choices.
    axes = ("layers", "tokens", "choices")
    choices_LKC = counts_of(choices, "topk_ids_of_layer", place, axes, least=-1, most=slots - 1)
    return np.stack([np.bincount(chosen[chosen >= 0], minlength=slots) for chosen in choices_LKC])


def trace_of_ring_buffer(counts_TLE: Array, origin: str, read_as: ReadAs) -> ArrayTrace:
    """The trace in what the mode ``stat`` dumped, tokens by logical expert ``[buffer, layers, experts]``.

    Rows without tokens are no steps, and layers without any are dense: neither is part of the trace, whose facts name
    the layers that are. Where every row is in use the buffer has wrapped around at some row that is not recorded; the
    trace's origin says so. Raises ``HeatError`` where nothing was counted.
    """
    read_as.refuse_unused("a dump of SGLang's recorder", "experts")
    checked = ArrayTrace(counts_TLE).heat(0, len(counts_TLE))
    full = checked.any(axis=(1, 2)).all() and len(checked) > 1
    origin += ", ring buffer full: its oldest step may be in the midst" if full else ""
    busy, moe, facts = _busy_part(checked, f"SGLang recorder ({origin})")
    return ArrayTrace(checked[np.ix_(busy, moe)], facts)


def _busy_part(heat_TLE: Array, origin: str) -> tuple[Int64, Int64, TraceFacts]:
    """Steps and layers that have tokens, and facts that say which were left out."""
    tokens_TL = heat_TLE.sum(axis=2)
    busy, moe = np.flatnonzero(tokens_TL.any(axis=1)), np.flatnonzero(tokens_TL.any(axis=0))
    if not busy.size:
        raise HeatError("holds no forward pass: all of its counts are zero; record while the model serves")
    empty, dense = len(heat_TLE) - busy.size, heat_TLE.shape[1] - moe.size
    origin += f", {empty} rows without tokens left out" if empty else ""
    origin += f", {dense} dense layers left out" if dense else ""
    return busy, moe, TraceFacts(origin, layer_numbers=tuple(moe.tolist()) if dense else ())
