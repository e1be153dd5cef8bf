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

from eplb_service.heat.window import HeatError
from eplb_service.io.containers import Array, Record, check_fits_memory, files_of_ranks, one_line, read_json
from eplb_service.io.named_arrays import ReadAs, as_array
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
        raise HeatError(f"holds no {_STATS} with tokens: was expert_load_stats_path set?")
    experts = read_as.experts or 1 + max(int(map_LP.max()) for map_LP, _ in runs)
    heat_TLE = np.concatenate([heat_of_slots(np.stack(loads), map_LP, experts) for map_LP, loads in runs])
    return ArrayTrace(heat_TLE, _vllm_facts(meta, shape[1], len(runs), idle))


def _load(place: str, content: Mapping[str, Any], read_as: ReadAs) -> tuple[Array, Array]:
    load_LP, map_LP = as_array(content.get("expert_load")), as_array(content.get("p2l_map"))
    if load_LP is None or load_LP.ndim != 2 or 0 in load_LP.shape:
        raise HeatError(f"{place} holds no expert_load [layers, slots]")
    if read_as.phy2log is not None:
        map_LP = read_as.phy2log.reshape(len(read_as.phy2log), -1)
    if map_LP is None:
        raise HeatError(f"{place} counts tokens by slot without a p2l_map; give the experts with --map")
    if map_LP.shape != load_LP.shape or map_LP.dtype.kind not in "iu" or map_LP.min() < 0:
        raise HeatError(f"{place} has a map of {list(map_LP.shape)} for slots of {list(load_LP.shape)}")
    return load_LP, map_LP


def _vllm_facts(meta: Mapping[str, Any], slots_of_all: int, placements: int, idle: int) -> TraceFacts:
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


def _is_tensorrt_llm_folder(folder: Path) -> bool:
    """Return whether a folder is one of such statistics."""
    return (folder / _META_FILE).exists() and any(folder.glob("rank*.safetensors"))


def _trace_of_tensorrt_llm_folder(folder: Path, _read_as: ReadAs) -> ArrayTrace:
    """The trace in such statistics, a step per iteration; raises ``HeatError`` where a rank or layer is missing."""
    meta = read_json(folder / _META_FILE)
    experts = meta.get("num_experts") if isinstance(meta, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(experts, int) or experts < 1:
        raise HeatError(f"{_META_FILE} names no num_experts")
    files = files_of_ranks(folder, _RANK_FILE)
    summed: dict[tuple[int, int], Int64] = {}
    for file in files.values():
        for key, counts_E in _read_safetensors(file).items():
            place, counts = _checked(file.name, key, counts_E, experts)
            summed[place] = summed[place] + counts if place in summed else counts
    if not summed:
        raise HeatError("holds no counts: was any iteration of EXPERT_STATISTIC_ITER_RANGE run?")
    iterations, layers = (sorted(set(numbers)) for numbers in zip(*summed, strict=True))
    check_fits_memory(8 * len(iterations) * len(layers) * experts)
    for iteration, layer in itertools.product(iterations, layers):
        if (iteration, layer) not in summed:
            raise HeatError(f"iteration {iteration} lacks layer {layer}, which others have")
    heat_TLE = np.stack([[summed[iteration, layer] for layer in layers] for iteration in iterations])
    top_k = meta.get("num_experts_per_token")
    origin = f"TensorRT-LLM's expert statistics, iterations {iterations[0]} to {iterations[-1]}"
    top_k = top_k if isinstance(top_k, int) and top_k > 0 else 0
    return ArrayTrace(
        heat_TLE, TraceFacts(origin, ranks=len(files), top_k=top_k, layer_numbers=numbered(layers))
    )


def _checked(name: str, key: str, counts_E: Array, experts: int) -> tuple[tuple[int, int], Int64]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise HeatError(f"{name}: holds {key[:64]!r}; expected names such as 100_3, iteration and layer")
    if counts_E.shape != (experts,) or counts_E.dtype.kind not in "iu":
        raise HeatError(
            f"{name}: {key} holds {counts_E.dtype} {list(counts_E.shape)}; "
            f"expected a count for each of {experts} experts"
        )
    return (int(match[1]), int(match[2])), counts_E.astype(np.int64)


def _read_safetensors(file: Path) -> dict[str, Array]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError as error:
        raise HeatError(
            f"holds safetensors, for which safetensors is needed: pip install 'eplb-service[safetensors]' ({error})"
        ) from error
    check_fits_memory(file.stat().st_size)
    try:
        return load_file(file)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise HeatError(f"{file.name}: is truncated or damaged ({one_line(error)})") from error


RECORDS = (_is_vllm_record, _trace_of_vllm_records)
FOLDER = (_is_tensorrt_llm_folder, _trace_of_tensorrt_llm_folder)
"""Recogniser and reader of each form."""
