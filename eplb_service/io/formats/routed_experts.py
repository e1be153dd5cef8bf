"""Experts that each token chose: Megatron's router traces, and responses of engines that return them.

Megatron writes JSON Lines, a file per rank. A record is one layer of one step on one rank, ``top_indices`` of the shape
``[tokens, choices]``. In training a step has one for each microbatch. The ranks' counts are summed; the layers of
multi-token prediction (``block`` is ``mtp``) are not the model's, and are left out.

vLLM (``--enable-return-routed-experts``) puts the experts into each choice of a response as an ``.npy`` in base64,
SGLang (``return_routed_experts``) into ``meta_info`` or ``sglext`` as int32 in base64 without a shape; lists of numbers
are read as well. A row is a token that was fed to the model: those of the prompt, then those that were generated but
for the last. Only generated tokens become steps, since these are made as decoding makes them.

References
----------
``megatron/core/transformer/moe/router_trace.py``, written where ``--moe-routing-trace-path`` is set;
https://docs.vllm.ai/en/latest/training/routed_experts/; ``sglang/srt/state_capturer/routed_experts.py``.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core.heat.window import HeatError
from eplb_service.io.containers import (
    Array,
    Record,
    check_fits_memory,
    counts_of,
    files_of_ranks,
    read_json,
    read_npy_bytes,
    records_of,
    refusing,
    whole_number,
)
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.routes import moe_layers, trace_of_routes
from eplb_service.io.trace import ArrayTrace, TraceFacts, numbered

RANK_FILE = r"router_trace_rank(?P<rank>\d+)\.jsonl"
"""Name of a file that holds the share of one of Megatron's ranks."""
_RANK_FILE = "router_trace_rank%d.jsonl"
_MAX_EXPERTS = 1 << 20
_FIELD = "routed_experts"
_EXTENSIONS = ("meta_info", "sglext")


def _is_megatron_record(content: Mapping[str, Any]) -> bool:
    """Return whether it is a record of a router trace."""
    return "top_indices" in content and "layer" in content and "step" in content


def _is_megatron_folder(folder: Path) -> bool:
    """Return whether a folder holds the ranks' files of a router trace."""
    return any(folder.glob("router_trace_rank*.jsonl"))


def _trace_of_megatron_folder(folder: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace of all ranks; raises ``HeatError`` (without the folder) where one's file is missing or damaged."""

    def records() -> Iterator[Record]:
        for file in files_of_ranks(folder, _RANK_FILE).values():
            for place, content in records_of(read_json(file)):
                yield f"{file.name}, {place}", content

    return _trace_of_megatron_records(records(), read_as)


def _trace_of_megatron_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace in such records; a step that lacks a layer of some rank is left out, which the origin says.

    E is the largest expert that was chosen, plus one, unless ``read_as`` says it. Raises ``HeatError`` where there is
    no whole step.
    """
    read_as.refuse_unused("a router trace of Megatron", "experts")
    chosen: dict[tuple[int, int], list[Array]] = defaultdict(list)
    reporters: dict[int, set[tuple[int, int]]] = defaultdict(set)
    predicted = False
    for place, content in records:
        if content.get("block") == "mtp":
            predicted = True
            continue
        step, layer, rank = (whole_number(content, name, place) for name in ("step", "layer", "rank"))
        chosen_KC = counts_of(
            content.get("top_indices"), "top_indices", place, ("tokens", "choices"), most=_MAX_EXPERTS
        )
        chosen[step, layer].append(chosen_KC.astype(np.int64))
        reporters[step].add((rank, layer))
    everybody = set().union(*reporters.values())
    whole = [step for step in sorted(reporters) if reporters[step] == everybody]
    parts = [chosen_KC for parts in chosen.values() for chosen_KC in parts if chosen_KC.size]
    if not whole or not parts:
        raise HeatError("holds no step that all layers of all ranks have recorded")
    found = 1 + max(int(chosen_KC.max()) for chosen_KC in parts)
    experts = read_as.experts or found
    if found > experts:
        raise HeatError(f"names expert {found - 1}; there are {experts}")
    layers, ranks = sorted({layer for _, layer in everybody}), len({rank for rank, _ in everybody})
    check_fits_memory(8 * len(whole) * len(layers) * experts)
    heat_TLE = np.zeros((len(whole), len(layers), experts), dtype=np.int64)
    for at, row in np.ndindex(*heat_TLE.shape[:2]):
        ids = np.concatenate([chosen_KC.ravel() for chosen_KC in chosen[whole[at], layers[row]]])
        heat_TLE[at, row] = np.bincount(ids, minlength=experts)
    left_out = len(reporters) - len(whole)
    origin = f"Megatron's router trace of {ranks} rank{'s' if ranks > 1 else ''}"
    origin += f", {left_out} incomplete steps left out" if left_out else ""
    origin += ", without multi-token prediction" if predicted else ""
    origin += "" if read_as.experts else f", {experts} experts by the largest that was chosen"
    tokens_T = np.array([sum(map(len, chosen[step, layers[0]])) for step in whole], dtype=np.int64)
    facts = TraceFacts(origin, top_k=parts[0].shape[1], layer_numbers=numbered(layers))
    return ArrayTrace(heat_TLE, facts, tokens_T, states_layers=True)


def _is_response(content: Mapping[str, Any]) -> bool:
    """Return whether a response returns experts of tokens; a list under the name alone is an array of routes."""
    return any(True for _ in _returned(content)) and not isinstance(content.get(_FIELD), list)


def _trace_of_responses(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace of all responses, decoded side by side in their order.

    Raises ``HeatError`` naming the response that is damaged, or asking for what it leaves open.
    """
    read_as.refuse_unused("responses with experts of each token", "experts", "batch", "top_k", makes="routes")
    requests: list[Array] = []
    prompts = "included"
    for place, content in records:
        for holder, value in _returned(content):
            prompt, completion = (
                _count(content, holder, f"{part}_tokens") for part in ("prompt", "completion")
            )
            tokens = None if prompt is None or completion is None else prompt + completion
            chosen_KLC = _chosen(value, place, tokens, read_as.top_k)
            generated = _generated(content, prompt, completion, len(chosen_KLC))
            if not 0 <= generated <= len(chosen_KLC) or (
                requests and chosen_KLC.shape[1:] != requests[0].shape[1:]
            ):
                raise HeatError(
                    f"{place} has {list(chosen_KLC.shape)} rows, layers and choices: not those of the others, or fewer "
                    "rows than the tokens that it counts"
                )
            if generated < len(chosen_KLC) or "prompt_routed_experts" in content:
                prompts = "left out"
            requests.append(chosen_KLC[len(chosen_KLC) - generated :])
    if not sum(map(len, requests)):
        raise HeatError("holds no generated token whose experts are known: the last one of each is never fed")
    chosen_KLC = np.concatenate(requests).astype(np.int64)
    moe = moe_layers(chosen_KLC)
    if not moe:
        raise HeatError("names no experts: every layer looks like a dense one")
    _check_distinct(chosen_KLC[:, moe])
    dense = chosen_KLC.shape[1] - len(moe)
    origin = f"experts of each token in an engine's responses, prompts {prompts}"
    return trace_of_routes(
        chosen_KLC[:, moe],
        np.cumsum([0, *map(len, requests)]),
        read_as.experts,
        read_as.batch,
        f"{origin}, {dense} dense layers left out" if dense else origin,
        layer_numbers=numbered(moe),
        padded=True,
    )


def _returned(content: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], object]]:
    """Yield what a response returns, each with the part of the response that holds it."""
    for part in (content, *_choices(content)):
        for holder in (part, *(part.get(name) for name in _EXTENSIONS)):
            if isinstance(holder, Mapping) and holder.get(_FIELD) is not None:
                yield holder, holder[_FIELD]


def _choices(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = content.get("choices")
    return [choice for choice in choices if isinstance(choice, Mapping)] if isinstance(choices, list) else []


def _chosen(value: object, place: str, tokens: int | None, top_k: int | None) -> Array:
    """Experts of each row ``[rows, L, C]``."""
    if isinstance(value, str):
        with refusing(f"{_FIELD} in base64"):
            content = base64.b64decode(value, validate=True)
            numpy = content.startswith(b"\x93NUMPY")
            value = (
                read_npy_bytes(content) if numpy else _shaped(np.frombuffer(content, "<i4"), tokens, top_k)
            )
    found = counts_of(value, _FIELD, place, ("tokens", "layers", "choices"), least=-1, most=_MAX_EXPERTS)
    if top_k is not None and found.shape[2] != top_k:
        raise HeatError(f"{place} has {found.shape[2]} choices of each token, not the {top_k} of --top-k")
    return found


def _shaped(numbers: Array, tokens: int | None, top_k: int | None) -> Array:
    """SGLang's numbers, which have no shape: rows by the tokens, choices as the user says, and the rest are layers."""
    rows = (tokens or 0) - 1
    if rows < 1 or numbers.size % rows:
        raise HeatError(
            f"{_FIELD} has {numbers.size} numbers and no shape, for {tokens} tokens (prompt_tokens and "
            "completion_tokens), the last of which has none; was it asked for from the sequence's start "
            "(routed_experts_start_len 0)?"
        )
    each = numbers.size // rows
    if top_k is None or each % top_k:
        raise HeatError(
            f"{_FIELD} has {each} numbers a token without a shape: say how many experts a token chooses "
            f"in each layer with --top-k, of which {each} is a multiple"
        )
    return numbers.reshape(rows, each // top_k, top_k)


def _generated(content: Mapping[str, Any], prompt: int | None, completion: int | None, rows: int) -> int:
    """Count the last rows that are of generated tokens; all, where the response does not say it."""
    if "prompt_routed_experts" in content:
        return rows
    if completion is not None and len(_choices(content)) < 2:
        return completion - 1
    return rows if prompt is None else rows - prompt


def _count(content: Mapping[str, Any], holder: Mapping[str, Any], name: str) -> int | None:
    for part in (holder, content.get("meta_info"), content.get("usage")):
        if isinstance(part, Mapping) and isinstance(part.get(name), int):
            return whole_number(part, name, "the response")
    return None


def _check_distinct(chosen_KLC: Array) -> None:
    """Raise ``HeatError`` where a token chooses an expert twice: then the numbers are not what they are taken for."""
    ordered_KLC = np.sort(chosen_KLC, axis=2)
    if ((ordered_KLC[..., 1:] == ordered_KLC[..., :-1]) & (ordered_KLC[..., 1:] >= 0)).any():
        raise HeatError(
            f"a token chooses an expert twice: are there really {chosen_KLC.shape[2]} choices in each layer?"
        )


RECORDS = (_is_megatron_record, _trace_of_megatron_records)
RESPONSES = (_is_response, _trace_of_responses)
FOLDER = (_is_megatron_folder, _trace_of_megatron_folder)
"""Recognisers and readers of each form."""
