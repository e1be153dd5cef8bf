"""Megatron's router traces: JSON Lines of the experts that each token chose, a file per rank.

A record is one layer of one step on one rank, ``top_indices`` of the shape ``[tokens, choices]``. In training a step
has one for each microbatch. The ranks' counts are summed; the layers of multi-token prediction (``block`` is ``mtp``)
are not the model's, and are left out.

References
----------
``megatron/core/transformer/moe/router_trace.py``, written where ``--moe-routing-trace-path`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.json_lines import Record, read_lines
from eplb_service.io.containers.numpy_file import check_fits_memory
from eplb_service.io.named_arrays import ReadAs, as_array
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts

_RANK_FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")
_MOST_EXPERTS = 1 << 20


class _Steps:
    """What has been counted so far, by step and layer."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], Int64] = {}
        self.tokens: dict[tuple[int, int], int] = {}
        self.reporters: dict[int, set[tuple[int, int]]] = {}
        self.experts = 0
        self.top_k = 0
        self.predicted = 0

    def add(self, place: str, content: Mapping[str, Any]) -> None:
        """Count one record's choices; raises ``HeatError`` naming it where it is damaged."""
        if content.get("block") == "mtp":
            self.predicted += 1
            return
        step, layer, rank = (_whole(place, content, name) for name in ("step", "layer", "rank"))
        chosen_KC = as_array(content.get("top_indices"))
        if chosen_KC is None or (
            chosen_KC.size and (chosen_KC.ndim != 2 or chosen_KC.dtype.kind not in "iu")
        ):
            raise HeatError(f"{place} holds no top_indices [tokens, choices]")
        if chosen_KC.size and (chosen_KC.min() < 0 or chosen_KC.max() >= _MOST_EXPERTS):
            raise HeatError(f"{place} names expert {chosen_KC.min()} or {chosen_KC.max()}; there is none")
        counts_E = np.bincount(chosen_KC.ravel().astype(np.int64))
        self.experts = max(self.experts, counts_E.size)
        self.top_k = max(self.top_k, chosen_KC.shape[1] if chosen_KC.ndim == 2 else 0)
        self.counts[step, layer] = _sum(self.counts.get((step, layer)), counts_E)
        self.tokens[step, layer] = self.tokens.get((step, layer), 0) + len(chosen_KC)
        self.reporters.setdefault(step, set()).add((rank, layer))


def is_record(content: Mapping[str, Any]) -> bool:
    """Whether it is a record of such a trace."""
    return "top_indices" in content and "layer" in content and "step" in content


def is_folder(folder: Path) -> bool:
    """Whether a folder holds the ranks' files of such a trace."""
    return any(_RANK_FILE.fullmatch(file.name) for file in folder.iterdir())


def trace_of_folder(folder: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace of all ranks; raises ``HeatError`` (without the folder) where one's file is missing or damaged."""
    files = {int(match[1]): file for file in folder.iterdir() if (match := _RANK_FILE.fullmatch(file.name))}
    absent = [rank for rank in range(max(files) + 1) if rank not in files]
    if absent:
        raise HeatError(
            f"lacks router_trace_rank{absent[0]}.jsonl; without it its tokens would be missing in every step"
        )
    return trace_of_records(_of_all(files), read_as)


def check_alone(path: Path) -> None:
    """Raise ``HeatError`` where the file at ``path`` is one rank's of several: it would be read as the whole run."""
    if _RANK_FILE.fullmatch(path.name) is None:
        return
    others = sorted(file.name for file in path.parent.iterdir() if _RANK_FILE.fullmatch(file.name))
    others.remove(path.name)
    if others:
        raise HeatError(
            f"has the tokens of one rank alone, and {others[0]} is beside it: open the folder for all ranks, "
            "or put the file elsewhere to read this rank alone"
        )


def trace_of_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace in such records; a step that lacks a layer of some rank is left out, which the origin says.

    E is the largest expert that was chosen, plus one, unless ``read_as`` says it. Raises ``HeatError`` where there is
    no whole step.
    """
    steps = _Steps()
    for place, content in records:
        steps.add(place, content)
    everybody = set().union(*steps.reporters.values())
    whole = [step for step in sorted(steps.reporters) if steps.reporters[step] == everybody]
    if not whole:
        raise HeatError("holds no step that all layers of all ranks have recorded")
    experts = read_as.experts or steps.experts
    if steps.experts > experts:
        raise HeatError(f"names expert {steps.experts - 1}; there are {experts}")
    layers = sorted({layer for _, layer in everybody})
    check_fits_memory(8 * len(whole) * len(layers) * experts)
    heat_TLE = np.zeros((len(whole), len(layers), experts), dtype=np.int64)
    for at, step in enumerate(whole):
        for row, layer in enumerate(layers):
            counts_E = steps.counts[step, layer]
            heat_TLE[at, row, : counts_E.size] = counts_E
    tokens_T = np.array([steps.tokens[step, layers[0]] for step in whole], dtype=np.int64)
    facts = _facts(steps, everybody, len(whole), layers)
    if not read_as.experts:
        facts = replace(facts, origin=f"{facts.origin}, {experts} experts by the largest that was chosen")
    return ArrayTrace(heat_TLE, facts, tokens_T)


def _of_all(files: Mapping[int, Path]) -> Iterator[Record]:
    for _, file in sorted(files.items()):
        for place, content in read_lines(file):
            yield Record(f"{file.name}, {place}", content)


def _facts(steps: _Steps, everybody: set[tuple[int, int]], whole: int, layers: list[int]) -> TraceFacts:
    ranks = len({rank for rank, _ in everybody})
    left_out = len(steps.reporters) - whole
    origin = f"Megatron's router trace of {ranks} rank{'s' if ranks > 1 else ''}"
    origin += f", {left_out} incomplete steps left out" if left_out else ""
    origin += ", without multi-token prediction" if steps.predicted else ""
    numbers = tuple(layers) if layers != list(range(len(layers))) else ()
    return TraceFacts(origin=origin, top_k=steps.top_k, layer_numbers=numbers)


def _sum(known_E: Int64 | None, counts_E: Int64) -> Int64:
    """Both counts together, as long as the longer one."""
    if known_E is None:
        return counts_E
    longer, shorter = (known_E, counts_E) if known_E.size >= counts_E.size else (counts_E, known_E)
    summed: Int64 = longer.copy()
    summed[: shorter.size] += shorter
    return summed


def _whole(place: str, content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise HeatError(f"{place} has the {name} {value!r}; expected a number from 0 on")
    return value
