"""Tokens that engines count and write themselves: vLLM's expert load by slot, TensorRT-LLM's expert statistics.

vLLM's offline EPLB writes JSON Lines: a record ``eplb_load_meta`` names the model and its ranks; each
``eplb_load_stats`` is one step, ``expert_load`` and ``p2l_map`` of the shape ``[layers, slots]``. Records of other
types, as scripts around it add, are skipped.

TensorRT-LLM writes a folder with ``meta_info.json`` and one ``rankN.safetensors`` per rank. Each rank counts the
experts that its own tokens chose, ``"ITERATION_LAYER"`` -> int64 ``[experts]``; the counts of an iteration are the sum
over the ranks, as TensorRT-LLM's own ``generate_eplb_config.py`` takes it.

References
----------
https://github.com/vllm-project/vllm/pull/41141, ``vllm/distributed/eplb/eplb_state.py``;
``tensorrt_llm/_torch/expert_statistic.py``, written where ``EXPERT_STATISTIC_ITER_RANGE`` is set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core.heat.window import HeatError
from eplb_service.io.containers import (
    Array,
    Record,
    as_array,
    check_fits_memory,
    counts_of,
    files_of_ranks,
    read_json,
    refusing,
    require,
)
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.routes import heat_of_slots
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts, numbered

_META, _STATS = "eplb_load_meta", "eplb_load_stats"
_BESIDE = ("session_metadata", "bench_run_start")
_META_FILE = "meta_info.json"
_RANK_FILE = "rank%d.safetensors"
_KEY = re.compile(r"(\d{1,12})_(\d{1,4})")


def _is_vllm_record(content: Mapping[str, Any]) -> bool:
    """Return whether it is a record of vLLM's expert load."""
    return content.get("record_type") in (_META, _STATS, *_BESIDE)


def _trace_of_vllm_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace in vLLM's records, a step per record with tokens; raises ``HeatError`` naming one that does not fit."""
    read_as.refuse_unused("vLLM's expert load", "phy2log", "experts")
    meta: Mapping[str, Any] = {}
    steps: list[tuple[Array, Array]] = []
    idle = 0
    for place, content in records:
        if content.get("record_type") == _META:
            meta = content
        if content.get("record_type") != _STATS:
            continue
        load_LP = counts_of(content.get("expert_load"), "expert_load", place, ("layers", "slots"))
        phy2log = as_array(content.get("p2l_map")) if read_as.phy2log is None else read_as.phy2log
        if phy2log is None:
            raise HeatError(f"{place} counts tokens by slot without a p2l_map; give the experts with --map")
        phy2log = read_as.map_of(load_LP[None], phy2log)
        if phy2log.size != load_LP.size or (steps and load_LP.shape != steps[0][0].shape):
            raise HeatError(
                f"{place} has {list(load_LP.shape)} layers and slots, others or its map another number"
            )
        if load_LP.any():
            steps.append((load_LP, phy2log.reshape(load_LP.shape)))
        else:
            idle += 1
    if not steps:
        raise HeatError(f"holds no {_STATS} with tokens: was expert_load_stats_path set?")
    experts = read_as.experts or 1 + max(int(map_LP.max()) for _, map_LP in steps)
    runs = [list(run) for _, run in itertools.groupby(steps, key=lambda step: step[1].tobytes())]
    heat_TLE = np.concatenate(
        [heat_of_slots(np.stack([load_LP for load_LP, _ in run]), run[0][1], experts) for run in runs]
    )
    return ArrayTrace(heat_TLE, _vllm_facts(meta, steps[0][0].shape[1], len(runs), idle))


def _vllm_facts(meta: Mapping[str, Any], slots_of_all: int, placements: int, idle: int) -> TraceFacts:
    ranks = meta.get("num_ranks")
    if not isinstance(ranks, int) or ranks < 1 or slots_of_all % ranks:
        ranks = 0
    switched = f", under {placements} placements in turn" if placements > 1 else ""
    left_out = f", {idle} steps without tokens left out" if idle else ""
    return TraceFacts(
        origin=f"vLLM's expert load, tokens by slot{switched}{left_out}",
        model=str(meta.get("model", "")),
        ranks=ranks,
        slots=slots_of_all // ranks if ranks else 0,
    )


def _is_tensorrt_llm_folder(folder: Path) -> bool:
    """Return whether a folder is one of such statistics."""
    return (folder / _META_FILE).exists() and any(folder.glob("rank*.safetensors"))


def _trace_of_tensorrt_llm_folder(folder: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace in such statistics, a step per iteration; raises ``HeatError`` where a rank or layer is missing."""
    read_as.refuse_unused("TensorRT-LLM's expert statistics", "experts")
    meta = read_json(folder / _META_FILE)
    experts, top_k = (
        isinstance(meta, dict) and meta.get(f"num_experts{part}") for part in ("", "_per_token")
    )
    files = files_of_ranks(folder, _RANK_FILE)
    summed: dict[tuple[int, int], Int64] = {}
    for file in files.values():
        for key, counts_E in _read_safetensors(file).items():
            match = _KEY.fullmatch(key)
            if match is None or counts_E.shape != (experts,) or counts_E.dtype.kind not in "iu":
                raise HeatError(
                    f"{file.name}: {key[:64]} holds {counts_E.dtype} {list(counts_E.shape)}; expected names such as "
                    f"100_3, iteration and layer, and counts of as many experts as {_META_FILE} names ({experts})"
                )
            place = int(match[1]), int(match[2])
            summed[place] = summed.get(place, 0) + counts_E.astype(np.int64)
    if not summed:
        raise HeatError("holds no counts: was any iteration of EXPERT_STATISTIC_ITER_RANGE run?")
    iterations, layers = (sorted(set(numbers)) for numbers in zip(*summed, strict=True))
    for iteration, layer in itertools.product(iterations, layers):
        if (iteration, layer) not in summed:
            raise HeatError(f"iteration {iteration} lacks layer {layer}, which others have")
    heat_TLE = np.stack([[summed[iteration, layer] for layer in layers] for iteration in iterations])
    facts = TraceFacts(
        origin=f"TensorRT-LLM's expert statistics, iterations {iterations[0]} to {iterations[-1]}",
        ranks=len(files),
        top_k=top_k if isinstance(top_k, int) and top_k > 0 else 0,
        layer_numbers=numbered(layers),
    )
    return ArrayTrace(heat_TLE, facts, states_layers=True)


def _read_safetensors(file: Path) -> dict[str, Array]:
    require("safetensors", "a file of safetensors", "safetensors")
    from safetensors.numpy import load_file

    check_fits_memory(file.stat().st_size)
    with refusing(f"file of safetensors ({file.name})"):
        return load_file(file)


RECORDS = (_is_vllm_record, _trace_of_vllm_records)
FOLDER = (_is_tensorrt_llm_folder, _trace_of_tensorrt_llm_folder)
"""Recogniser and reader of each form."""
