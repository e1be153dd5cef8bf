"""TensorRT-LLM's expert statistics: a folder with ``meta_info.json`` and one ``rankN.safetensors`` per rank.

Each rank counts the experts that its own tokens chose, ``"ITERATION_LAYER"`` -> int64 ``[experts]``; the counts of an
iteration are the sum over the ranks, as TensorRT-LLM's own ``generate_eplb_config.py`` takes it.

References
----------
``tensorrt_llm/_torch/expert_statistic.py``, written where ``EXPERT_STATISTIC_ITER_RANGE`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.json_file import read_json
from eplb_service.io.containers.numpy_file import Array, check_fits_memory
from eplb_service.io.containers.safetensors_file import read_safetensors
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts

_META = "meta_info.json"
_RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
_KEY = re.compile(r"(\d{1,12})_(\d{1,4})")


def is_statistics(folder: Path) -> bool:
    """Whether a folder is one of such statistics."""
    return (folder / _META).exists() and any(_RANK_FILE.fullmatch(file.name) for file in folder.iterdir())


def trace_of_statistics(folder: Path) -> ArrayTrace:
    """The trace in a folder of statistics, a step per iteration.

    Raises
    ------
    HeatError
        Without the path: where ranks are missing, or layers in some iteration.
    """
    meta = read_json(folder / _META)
    experts = meta.get("num_experts") if isinstance(meta, Mapping) else None
    if not isinstance(experts, int) or experts < 1:
        raise HeatError(f"{_META} names no num_experts")
    files = {int(match[1]): file for file in folder.iterdir() if (match := _RANK_FILE.fullmatch(file.name))}
    absent = [rank for rank in range(max(files) + 1) if rank not in files]
    if absent:
        raise HeatError(
            f"lacks rank{absent[0]}.safetensors; without it its tokens would be missing in every step"
        )
    summed: dict[tuple[int, int], Int64] = {}
    for _, file in sorted(files.items()):
        for key, counts_E in read_safetensors(file).items():
            place, counts = _checked(file.name, key, counts_E, experts)
            summed[place] = summed[place] + counts if place in summed else counts
    top_k = meta.get("num_experts_per_token") if isinstance(meta, Mapping) else None
    return _trace(summed, experts, len(files), top_k if isinstance(top_k, int) and top_k > 0 else 0)


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


def _trace(summed: Mapping[tuple[int, int], Int64], experts: int, ranks: int, top_k: int) -> ArrayTrace:
    iterations = sorted({iteration for iteration, _ in summed})
    layers = sorted({layer for _, layer in summed})
    if not summed:
        raise HeatError("holds no counts: was any iteration of EXPERT_STATISTIC_ITER_RANGE run?")
    check_fits_memory(8 * len(iterations) * len(layers) * experts)
    lacking = next(((i, layer) for i in iterations for layer in layers if (i, layer) not in summed), None)
    if lacking is not None:
        raise HeatError(f"iteration {lacking[0]} lacks layer {lacking[1]}, which others have")
    heat_TLE = np.stack(
        [np.stack([summed[iteration, layer] for layer in layers]) for iteration in iterations]
    )
    numbers = tuple(layers) if layers != list(range(len(layers))) else ()
    facts = TraceFacts(
        origin=f"TensorRT-LLM's expert statistics, iterations {iterations[0]} to {iterations[-1]}",
        ranks=ranks,
        top_k=top_k,
        layer_numbers=numbers,
    )
    return ArrayTrace(heat_TLE, facts)
