"""Readers for the token counts that engines write: vLLM's expert load and TensorRT-LLM's expert statistics.

vLLM's offline EPLB writes JSON Lines. An ``eplb_load_meta`` record has the model and the number of ranks. Each
``eplb_load_stats`` record is one step, with ``expert_load`` and ``p2l_map`` of shape ``[layers, slots]``. The reader
skips records of other types, which scripts may add.

TensorRT-LLM writes a folder with ``meta_info.json`` and one ``rankN.safetensors`` per rank, if
``EXPERT_STATISTIC_ITER_RANGE`` is set. Each rank counts the experts that its own tokens chose, as int64 ``[experts]``
under the name ``"ITERATION_LAYER"``. The reader sums an iteration over the ranks, like TensorRT-LLM's own
``generate_eplb_config.py``.

References
----------
https://github.com/vllm-project/vllm/pull/41141, ``vllm/distributed/eplb/eplb_state.py``;
``tensorrt_llm/_torch/expert_statistic.py``.
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
    reporting_damage,
    require,
)
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.routes import heat_of_slots
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts, numbered

_META = "eplb_load_meta"
_STATS = "eplb_load_stats"
_SCRIPT_RECORDS = ("session_metadata", "bench_run_start")
"""Record types that vLLM's scripts add."""
_META_FILE = "meta_info.json"
_RANK_FILE = "rank%d.safetensors"
_KEY = re.compile(r"(\d{1,12})_(\d{1,4})")
"""Name of an array in TensorRT-LLM's statistics: iteration and layer."""


def _is_vllm_record(content: Mapping[str, Any]) -> bool:
    """Return True if a record may be part of vLLM's expert load."""
    return content.get("record_type") in (_META, _STATS, *_SCRIPT_RECORDS)


def _trace_of_vllm_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """Build the trace from vLLM's records, with one step for each record that has tokens.

    Raises ``HeatError`` naming the first record that is invalid.
    """
    read_as.refuse_unused("vLLM's expert load", "phy2log", "experts")
    meta: Mapping[str, Any] = {}
    steps: list[tuple[Array, Array]] = []
    idle = 0
    for location, content in records:
        if content.get("record_type") == _META:
            meta = content
        if content.get("record_type") != _STATS:
            continue
        load_LP = counts_of(content.get("expert_load"), "expert_load", location, ("layers", "slots"))
        phy2log = as_array(content.get("p2l_map")) if read_as.phy2log is None else read_as.phy2log
        if phy2log is None:
            raise HeatError(
                f"{location} counts tokens by slot but has no p2l_map; pass the expert in each slot with --map"
            )
        phy2log = read_as.map_of(load_LP[None], phy2log)
        if phy2log.size != load_LP.size or (steps and load_LP.shape != steps[0][0].shape):
            raise HeatError(
                f"{location} has counts of shape {list(load_LP.shape)} (layers, slots), unlike its map or an "
                "earlier record"
            )
        if load_LP.any():
            steps.append((load_LP, phy2log.reshape(load_LP.shape)))
        else:
            idle += 1
    if not steps:
        raise HeatError(f"has no {_STATS} with tokens; set expert_load_stats_path while the model is serving")
    experts = read_as.experts or 1 + max(int(map_LP.max()) for _, map_LP in steps)
    runs = [list(run) for _, run in itertools.groupby(steps, key=lambda step: step[1].tobytes())]
    heat_TLE = np.concatenate(
        [heat_of_slots(np.stack([load_LP for load_LP, _ in run]), run[0][1], experts) for run in runs]
    )
    return ArrayTrace(heat_TLE, _vllm_facts(meta, steps[0][0].shape[1], len(runs), idle))


def _vllm_facts(meta: Mapping[str, Any], all_slots: int, placements: int, idle: int) -> TraceFacts:
    """Collect the facts in vLLM's records.

    Parameters
    ----------
    meta
        Record ``eplb_load_meta``, or an empty dictionary.
    all_slots
        Total number of slots on all ranks.
    placements
        Number of placements used in succession.
    idle
        Number of steps without tokens.
    """
    ranks = meta.get("num_ranks")
    if not isinstance(ranks, int) or ranks < 1 or all_slots % ranks:
        ranks = 0
    origin = "vLLM's expert load, tokens by slot"
    origin += f", {placements} successive placements" if placements > 1 else ""
    origin += f", {idle} steps left out (no tokens)" if idle else ""
    return TraceFacts(
        origin=origin,
        model=str(meta.get("model", "")),
        ranks=ranks,
        slots=all_slots // ranks if ranks else 0,
    )


def _is_tensorrt_llm_folder(folder: Path) -> bool:
    """Return True if a folder contains TensorRT-LLM's expert statistics."""
    return (folder / _META_FILE).exists() and any(folder.glob("rank*.safetensors"))


def _trace_of_tensorrt_llm_folder(folder: Path, read_as: ReadAs) -> ArrayTrace:
    """Build the trace from TensorRT-LLM's expert statistics, with one step per iteration.

    Raises ``HeatError`` if the file of a rank is missing or damaged, or if an iteration does not have every layer.
    """
    read_as.refuse_unused("TensorRT-LLM's expert statistics", "experts")
    meta = read_json(folder / _META_FILE)
    counts = meta if isinstance(meta, dict) else {}
    experts = counts.get("num_experts")
    top_k = counts.get("num_experts_per_token")
    files = files_of_ranks(folder, _RANK_FILE)
    summed: dict[tuple[int, int], Int64] = {}
    for file in files.values():
        for key, counts_E in _read_safetensors(file).items():
            match = _KEY.fullmatch(key)
            if match is None or counts_E.shape != (experts,) or counts_E.dtype.kind not in "iu":
                raise HeatError(
                    f"{file.name}: {key[:64]} holds {counts_E.dtype} of shape {list(counts_E.shape)}; expected names "
                    f"such as 100_3 (iteration and layer), and counts for {experts} experts, as stated in {_META_FILE}"
                )
            iteration_and_layer = int(match[1]), int(match[2])
            summed[iteration_and_layer] = summed.get(iteration_and_layer, 0) + counts_E.astype(np.int64)
    if not summed:
        raise HeatError("has no counts; run the model through the iterations in EXPERT_STATISTIC_ITER_RANGE")
    iterations, layers = (sorted(set(numbers)) for numbers in zip(*summed, strict=True))
    for iteration, layer in itertools.product(iterations, layers):
        if (iteration, layer) not in summed:
            raise HeatError(f"iteration {iteration} has no layer {layer}, unlike other iterations")
    heat_TLE = np.stack([[summed[iteration, layer] for layer in layers] for iteration in iterations])
    facts = TraceFacts(
        origin=f"TensorRT-LLM's expert statistics, iterations {iterations[0]} to {iterations[-1]}",
        ranks=len(files),
        top_k=top_k if isinstance(top_k, int) and top_k > 0 else 0,
        layer_numbers=numbered(layers),
    )
    return ArrayTrace(heat_TLE, facts, states_layers=True)


def _read_safetensors(file: Path) -> dict[str, Array]:
    """Return the arrays in a safetensors file, keyed by name. Raises ``HeatError``."""
    require("safetensors", "a safetensors file", "safetensors")
    from safetensors.numpy import load_file

    check_fits_memory(file.stat().st_size)
    with reporting_damage(f"safetensors file ({file.name})"):
        return load_file(file)


RECORDS = (_is_vllm_record, _trace_of_vllm_records)
FOLDER = (_is_tensorrt_llm_folder, _trace_of_tensorrt_llm_folder)
"""Functions that recognise and read each kind of file."""
