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

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers import Array, check_alone
from eplb_service.io.named_arrays import ReadAs, as_array
from eplb_service.io.routes import heat_of_slots
from eplb_service.io.trace import PHASES, ArrayTrace, Int64, TraceFacts

_MAP = "last_physical_to_logical_map"
_LAST_PASS = 1 << 62
_MIXED = PHASES.index("mixed")
_MODES = {1: PHASES.index("prefill"), 2: PHASES.index("decode"), 3: _MIXED}
"""Phases by SGLang's numbers of forward modes; others, such as idle, leave a step's phase unknown."""


class _Pass:
    """One forward pass, summed over what has been reported of it."""

    def __init__(self, counts_LP: Array) -> None:
        self.counts_LP: Int64 = np.zeros(counts_LP.shape, dtype=np.int64)
        self.reporters: set[tuple[int, str]] = set()
        self.tokens = 0
        self.modes: set[int] = set()

    @property
    def phase(self) -> int:
        """Index into ``PHASES``."""
        return _MIXED if len(self.modes) > 1 else next(iter(self.modes), 0)


def is_dump(document: object) -> bool:
    """Return whether a file's content is such a dump."""
    return isinstance(document, Mapping) and "records" in document


def trace_of_dumps(dumps: Sequence[tuple[str, Mapping[Any, Any]]], read_as: ReadAs) -> ArrayTrace:
    """The trace in the dumps of one run's ranks, each with the name of its file.

    A pass that not all ranks have recorded is left out, which the trace's origin says. Raises ``HeatError`` where
    the dumps contradict each other, or are not of one run.
    """
    phy2log = read_as.phy2log
    passes: dict[int, _Pass] = {}
    ranks: set[int] = set()
    for name, dump in dumps:
        try:
            phy2log = _agreed_map(phy2log, dump, own=read_as.phy2log is not None)
            ranks |= _add(passes, dump, as_array(phy2log))
        except HeatError as error:
            raise HeatError(f"{name}: {error}" if len(dumps) > 1 else str(error)) from error
    if phy2log is None:
        raise HeatError(f"holds tokens by slot without {_MAP}; give it with --map")
    whole = [number for number in sorted(passes) if {rank for rank, _ in passes[number].reporters} == ranks]
    if not whole:
        raise HeatError(f"there is no forward pass that all of {len(ranks)} ranks have recorded")
    kept = [passes[number] for number in whole]
    left_out = (
        f", {len(passes) - len(whole)} passes not recorded by all left out"
        if len(whole) < len(passes)
        else ""
    )
    heat_TLE = heat_of_slots(np.stack([one.counts_LP for one in kept]), phy2log, read_as.experts)
    busy, moe, facts = _busy_part(heat_TLE, f"SGLang recorder, per pass, {len(ranks)} ranks{left_out}")
    tokens_T = np.array([one.tokens for one in kept], dtype=np.int64)[busy]
    phase_T = np.array([one.phase for one in kept], dtype=np.int64)[busy]
    return ArrayTrace(
        heat_TLE[np.ix_(busy, moe)],
        replace(facts, phases=PHASES),
        tokens_T if tokens_T.all() else None,
        phase_T=phase_T,
    )


def trace_of_ring_buffer(counts_TLE: Array, origin: str) -> ArrayTrace:
    """The trace in what the mode ``stat`` dumped, tokens by logical expert ``[buffer, layers, experts]``.

    Rows without tokens are no steps, and layers without any are dense: neither is part of the trace, whose facts name
    the layers that are. Where every row is in use the buffer has wrapped around at some row that is not recorded; the
    trace's origin says so. Raises ``HeatError`` where nothing was counted.
    """
    checked = ArrayTrace(counts_TLE).heat(0, len(counts_TLE))
    busy, moe, facts = _busy_part(checked, f"SGLang recorder ({origin})")
    if busy.size == len(counts_TLE) > 1:
        facts = replace(
            facts, origin=f"{facts.origin}, ring buffer full: its oldest step may be in the midst"
        )
    return ArrayTrace(checked[np.ix_(busy, moe)], facts)


def check_all_ranks(path: Path) -> None:
    """Raise ``HeatError`` where the dump at ``path`` is one rank's of several."""
    check_alone(path, rf".+_(?P<rank>\d+){re.escape(path.suffix)}")


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


def _add(passes: dict[int, _Pass], dump: Mapping[Any, Any], phy2log: Array | None) -> set[int]:
    """Add one file's records to ``passes``; returns the ranks that they are of."""
    records = dump["records"]
    if not isinstance(records, list) or not records:
        raise HeatError("holds no records of forward passes")
    ranks = set()
    for position, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise HeatError(f"record {position} is no record of a forward pass")
        number = _whole(record, "forward_pass_id", position, position)
        rank = _whole(record, "rank", 0, position)
        counts_LP = _counts(record, position, phy2log)
        known = passes.setdefault(number, _Pass(counts_LP))
        shapes = {one.counts_LP.shape for one in (known, next(iter(passes.values())))} | {counts_LP.shape}
        if len(shapes) > 1:
            raise HeatError(
                f"records have several shapes: {', '.join(str(list(shape)) for shape in sorted(shapes))}"
            )
        who = rank, str(record.get("gatherer_key", ""))
        if who in known.reporters:
            raise HeatError(f"rank {rank} has recorded forward pass {number} twice; are these of one run?")
        known.reporters.add(who)
        known.counts_LP += counts_LP.astype(np.int64)
        known.tokens += len(record["input_ids"]) if isinstance(record.get("input_ids"), list) else 0
        mode = record.get("forward_mode")
        if isinstance(mode, int) and mode in _MODES:
            known.modes.add(_MODES[mode])
        ranks.add(rank)
    return ranks


def _counts(record: Mapping[Any, Any], position: int, phy2log: Array | None) -> Array:
    """Tokens by slot ``[L, P]`` of one record, counted from the choices of its tokens where it has no counts."""
    counts_LP = as_array(record.get("global_physical_count"))
    if counts_LP is None:
        choices_LKC = as_array(record.get("topk_ids_of_layer"))
        if choices_LKC is not None and choices_LKC.ndim == 3 and phy2log is not None:
            return _counted(choices_LKC, phy2log.reshape(phy2log.shape[0], -1).shape[-1], position)
    if counts_LP is None or counts_LP.ndim != 2 or 0 in counts_LP.shape:
        raise HeatError(f"record {position} has no global_physical_count [layers, slots]")
    if counts_LP.dtype.kind not in "iu" or counts_LP.min() < 0 or counts_LP.max() > np.iinfo(np.int32).max:
        raise HeatError(f"record {position} counts no tokens ({counts_LP.dtype}, from {counts_LP.min()})")
    return counts_LP


def _counted(choices_LKC: Array, slots: int, position: int) -> Array:
    if choices_LKC.dtype.kind not in "iu" or (choices_LKC.size and choices_LKC.max() >= slots):
        raise HeatError(f"record {position} names slots past the {slots} that there are")
    # -1 is where a token has no more choices.
    return np.stack(
        [np.bincount(choices_KC[choices_KC >= 0].ravel(), minlength=slots) for choices_KC in choices_LKC]
    )


def _agreed_map(known: Array | None, dump: Mapping[Any, Any], *, own: bool) -> Array | None:
    """The map that all files agree on; a user's ``own`` goes before theirs."""
    stated = as_array(dump.get(_MAP))
    if own or stated is None:
        return known
    if known is not None and not np.array_equal(known, stated):
        raise HeatError(f"has another {_MAP} than the others; these are not dumps of one run")
    return stated


def _whole(record: Mapping[Any, Any], name: str, otherwise: int, position: int) -> int:
    value = record.get(name, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LAST_PASS:
        raise HeatError(f"record {position} has the {name} {value!r}; expected a number from 0 on")
    return value
