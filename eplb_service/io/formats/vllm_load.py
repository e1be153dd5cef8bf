"""The expert load that vLLM's offline EPLB writes as JSON Lines: tokens by slot, each record with its map.

A record ``eplb_load_meta`` names the model and its ranks; each ``eplb_load_stats`` is one step, ``expert_load`` and
``p2l_map`` of the shape ``[layers, slots]``. Records of other types, as scripts around it add, are skipped.

References
----------
https://github.com/vllm-project/vllm/pull/41141, ``vllm/distributed/eplb/eplb_state.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.json_lines import Record
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.named_arrays import ReadAs, as_array
from eplb_service.io.slot_heat import heat_of_slots
from eplb_service.io.trace import ArrayTrace, TraceFacts

_META, _STATS = "eplb_load_meta", "eplb_load_stats"
_BESIDE = ("session_metadata", "bench_run_start")


def is_record(content: Mapping[str, Any]) -> bool:
    """Whether it is a record of such a file."""
    return content.get("record_type") in (_META, _STATS, *_BESIDE)


def trace_of_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace in such a file, a step per record that has tokens.

    Raises
    ------
    HeatError
        Without the path: where a record has no map, or not the shape of those before it.
    """
    meta: Mapping[str, Any] = {}
    runs: list[tuple[Array, list[Array]]] = []
    shape: tuple[int, ...] | None = None
    idle = 0
    for place, content in records:
        if content.get("record_type") == _META:
            meta = content
        if content.get("record_type") != _STATS:
            continue
        load_LP, map_LP = _load(place, content, read_as)
        if shape is not None and load_LP.shape != shape:
            raise HeatError(f"{place} is of {list(load_LP.shape)} layers and slots, others of {list(shape)}")
        shape = load_LP.shape
        if not load_LP.any():
            idle += 1
        elif runs and np.array_equal(runs[-1][0], map_LP):
            runs[-1][1].append(load_LP)
        else:
            runs.append((map_LP, [load_LP]))
    if not runs or shape is None:
        raise HeatError(
            f"holds no {_STATS} with tokens: was expert_load_stats_path set while the model served?"
        )
    experts = read_as.experts or 1 + max(int(map_LP.max()) for map_LP, _ in runs)
    heat_TLE = np.concatenate([heat_of_slots(np.stack(loads), map_LP, experts) for map_LP, loads in runs])
    return ArrayTrace(heat_TLE, _facts(meta, shape[1], len(runs), idle))


def _load(place: str, content: Mapping[str, Any], read_as: ReadAs) -> tuple[Array, Array]:
    load_LP, map_LP = as_array(content.get("expert_load")), as_array(content.get("p2l_map"))
    if load_LP is None or load_LP.ndim != 2 or 0 in load_LP.shape:
        raise HeatError(f"{place} holds no expert_load [layers, slots]")
    if read_as.phy2log is not None:
        map_LP = read_as.phy2log.reshape(len(read_as.phy2log), -1)
    if map_LP is None:
        raise HeatError(
            f"{place} counts tokens by slot without a p2l_map; give the expert in each slot with --map"
        )
    if map_LP.shape != load_LP.shape or map_LP.dtype.kind not in "iu" or map_LP.min() < 0:
        raise HeatError(f"{place} has a map of {list(map_LP.shape)} for slots of {list(load_LP.shape)}")
    return load_LP, map_LP


def _facts(meta: Mapping[str, Any], slots_of_all: int, placements: int, idle: int) -> TraceFacts:
    ranks, model = meta.get("num_ranks"), meta.get("model")
    whole = isinstance(ranks, int) and ranks > 0 and slots_of_all % ranks == 0
    switched = f", under {placements} placements in turn" if placements > 1 else ""
    left_out = f", {idle} steps without tokens left out" if idle else ""
    return TraceFacts(
        origin=f"vLLM's expert load, tokens by slot{switched}{left_out}",
        model=model if isinstance(model, str) else "",
        ranks=ranks if whole and isinstance(ranks, int) else 0,
        slots=slots_of_all // ranks if whole and isinstance(ranks, int) else 0,
    )
