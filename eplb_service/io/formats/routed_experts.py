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
import binascii
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io import routes
from eplb_service.io.containers import (
    Array,
    Record,
    check_alone,
    check_fits_memory,
    files_of_ranks,
    read_lines,
    read_npy_bytes,
)
from eplb_service.io.named_arrays import ReadAs, as_array
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts, numbered

_RANK_FILE = "router_trace_rank%d.jsonl"
_MOST_EXPERTS = 1 << 20
_FIELD = "routed_experts"
_EXTENSIONS = ("meta_info", "sglext")
_NPY = b"\x93NUMPY"


def _is_megatron_record(content: Mapping[str, Any]) -> bool:
    """Return whether it is a record of a router trace."""
    return "top_indices" in content and "layer" in content and "step" in content


def _is_megatron_folder(folder: Path) -> bool:
    """Return whether a folder holds the ranks' files of a router trace."""
    return any(folder.glob("router_trace_rank*.jsonl"))


def _trace_of_megatron_folder(folder: Path, read_as: ReadAs) -> ArrayTrace:
    """The trace of all ranks; raises ``HeatError`` (without the folder) where one's file is missing or damaged."""
    files = files_of_ranks(folder, _RANK_FILE).values()
    records = ((f"{file.name}, {place}", content) for file in files for place, content in read_lines(file))
    return _trace_of_megatron_records(records, read_as)


def check_all_ranks(path: Path) -> None:
    """Raise ``HeatError`` where the file at ``path`` is one rank's of several."""
    check_alone(path, r"router_trace_rank(?P<rank>\d+)\.jsonl")


def _trace_of_megatron_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace in such records; a step that lacks a layer of some rank is left out, which the origin says.

    E is the largest expert that was chosen, plus one, unless ``read_as`` says it. Raises ``HeatError`` where there is
    no whole step.
    """
    counts: dict[tuple[int, int], list[Int64]] = defaultdict(list)
    tokens: Counter[tuple[int, int]] = Counter()
    reporters: dict[int, set[tuple[int, int]]] = defaultdict(set)
    found, top_k, predicted = 0, 0, False
    for place, content in records:
        if content.get("block") == "mtp":
            predicted = True
            continue
        step, layer, rank = (_whole(place, content, name) for name in ("step", "layer", "rank"))
        chosen_KC = _top_indices(place, content)
        counts_E = np.bincount(chosen_KC.ravel().astype(np.int64))
        found, top_k = max(found, counts_E.size), max(top_k, chosen_KC.shape[1] if chosen_KC.ndim == 2 else 0)
        counts[step, layer].append(counts_E)
        tokens[step, layer] += len(chosen_KC)
        reporters[step].add((rank, layer))
    everybody = set().union(*reporters.values())
    whole = [step for step in sorted(reporters) if reporters[step] == everybody]
    if not whole:
        raise HeatError("holds no step that all layers of all ranks have recorded")
    experts = read_as.experts or found
    if found > experts:
        raise HeatError(f"names expert {found - 1}; there are {experts}")
    layers, ranks = sorted({layer for _, layer in everybody}), len({rank for rank, _ in everybody})
    check_fits_memory(8 * len(whole) * len(layers) * experts)
    heat_TLE = np.zeros((len(whole), len(layers), experts), dtype=np.int64)
    for at, row in np.ndindex(*heat_TLE.shape[:2]):
        for counts_E in counts[whole[at], layers[row]]:
            heat_TLE[at, row, : counts_E.size] += counts_E
    left_out = len(reporters) - len(whole)
    origin = f"Megatron's router trace of {ranks} rank{'s' if ranks > 1 else ''}"
    origin += f", {left_out} incomplete steps left out" if left_out else ""
    origin += ", without multi-token prediction" if predicted else ""
    origin += "" if read_as.experts else f", {experts} experts by the largest that was chosen"
    tokens_T = np.array([tokens[step, layers[0]] for step in whole], dtype=np.int64)
    return ArrayTrace(heat_TLE, TraceFacts(origin, top_k=top_k, layer_numbers=numbered(layers)), tokens_T)


def _top_indices(place: str, content: Mapping[str, Any]) -> Array:
    chosen_KC = as_array(content.get("top_indices"))
    if chosen_KC is None or (chosen_KC.size and (chosen_KC.ndim != 2 or chosen_KC.dtype.kind not in "iu")):
        raise HeatError(f"{place} holds no top_indices [tokens, choices]")
    if chosen_KC.size and (chosen_KC.min() < 0 or chosen_KC.max() >= _MOST_EXPERTS):
        raise HeatError(f"{place} names expert {chosen_KC.min()} or {chosen_KC.max()}; there is none")
    return chosen_KC


def _whole(place: str, content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise HeatError(f"{place} has the {name} {value!r}; expected a number from 0 on")
    return value


def _is_response(content: Mapping[str, Any]) -> bool:
    """Return whether a response returns experts of tokens in one of these forms."""
    return any(True for _ in _returned(content)) and not _is_array(content)


def _trace_of_responses(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """The trace of all responses, decoded side by side in their order.

    Raises ``HeatError`` naming the response that is damaged, or asking for what it leaves open.
    """
    requests: list[Array] = []
    prompts_left_out = False
    for place, content in records:
        for holder, value in _returned(content):
            try:
                chosen_KLC = _chosen(value, _tokens(content, holder), read_as)
                generated = _generated(content, holder, len(chosen_KLC))
            except HeatError as error:
                raise HeatError(f"{place}: {error}") from error
            if requests and chosen_KLC.shape[1:] != requests[0].shape[1:]:
                raise HeatError(
                    f"{place} has {list(chosen_KLC.shape[1:])} layers and choices, "
                    f"others {list(requests[0].shape[1:])}"
                )
            prompts_left_out |= generated < len(chosen_KLC) or "prompt_routed_experts" in content
            requests.append(chosen_KLC[len(chosen_KLC) - generated :])
    if not sum(map(len, requests)):
        raise HeatError("holds no generated token whose experts are known: the last one of each is never fed")
    return _trace(requests, read_as, prompts_left_out)


def _trace(requests: list[Array], read_as: ReadAs, prompts_left_out: bool) -> ArrayTrace:
    chosen_KLC = np.concatenate(requests).astype(np.int64)
    moe = _moe_layers(chosen_KLC)
    if not moe:
        raise HeatError("names no experts: every layer looks like a dense one")
    chosen_KLC = chosen_KLC[:, moe]
    _check_distinct(chosen_KLC)
    experts = read_as.experts or int(chosen_KLC.max()) + 1
    bounds = np.concatenate([[0], np.cumsum([len(request) for request in requests])])
    heat_TLE, tokens_T = routes.heat_of_routes(chosen_KLC, bounds, experts, read_as.batch, padded=True)
    dense = requests[0].shape[1] - len(moe)
    origin = "experts of each token in an engine's responses"
    origin += ", prompts left out" if prompts_left_out else ", prompts included"
    origin += f", {dense} dense layers left out" if dense else ""
    origin += "" if read_as.experts else f", {experts} experts by the largest that was chosen"
    facts = TraceFacts(
        origin=origin,
        top_k=chosen_KLC.shape[2],
        batching=routes.rule(read_as.batch, len(requests)),
        layer_numbers=tuple(moe) if dense else (),
    )
    return ArrayTrace(heat_TLE, facts, tokens_T)


def _returned(content: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], object]]:
    """Yield what a response returns, each with the part of the response that holds it."""
    choices = content.get("choices")
    parts = [content, *(choice for choice in _list(choices) if isinstance(choice, Mapping))]
    for part in parts:
        holders = [part, *(part[name] for name in _EXTENSIONS if isinstance(part.get(name), Mapping))]
        for holder in holders:
            if holder.get(_FIELD) is not None:
                yield holder, holder[_FIELD]


def _is_array(content: Mapping[str, Any]) -> bool:
    """Return whether it is a dictionary of arrays and no response."""
    return isinstance(content.get(_FIELD), list) and not {"choices", "usage", *_EXTENSIONS} & set(content)


def _chosen(value: object, tokens: int | None, read_as: ReadAs) -> Array:
    """Experts of each row ``[rows, L, C]``."""
    if isinstance(value, str):
        try:
            content = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise HeatError(f"{_FIELD} is no base64 ({error})") from error
        if not content.startswith(_NPY):
            return _shaped(content, tokens, read_as.top_k)
        array: Array | None = read_npy_bytes(content)
    else:
        array = as_array(value)
    if array is None or array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        found = "no numbers" if array is None else f"{array.dtype} {list(array.shape)}"
        raise HeatError(f"{_FIELD} holds {found}; expected [tokens, layers, choices]")
    return array


def _shaped(content: bytes, tokens: int | None, top_k: int | None) -> Array:
    """SGLang's numbers, which have no shape: rows by the tokens, choices as the user says, and the rest are layers."""
    if len(content) % 4 or not content:
        raise HeatError(f"{_FIELD} is no int32: it has {len(content)} bytes")
    numbers = np.frombuffer(content, dtype="<i4")
    if tokens is None:
        raise HeatError(f"{_FIELD} has no shape, and the response no prompt_tokens and completion_tokens")
    rows = tokens - 1
    if rows < 1 or numbers.size % rows:
        raise HeatError(
            f"{_FIELD} has {numbers.size} numbers for {rows} tokens, which does not divide evenly; "
            "was it asked for from the sequence's start (routed_experts_start_len 0)?"
        )
    each = numbers.size // rows
    if top_k is None:
        raise HeatError(
            f"{_FIELD} has {each} numbers a token without a shape: say how many experts a token chooses "
            "in each layer with --top-k"
        )
    if each % top_k:
        raise HeatError(f"{_FIELD} has {each} numbers a token, which are no layers of {top_k} choices each")
    return numbers.reshape(rows, each // top_k, top_k)


def _tokens(content: Mapping[str, Any], holder: Mapping[str, Any]) -> int | None:
    """Tokens of the sequence, prompt and completion; ``None`` where the response does not say them."""
    prompt, completion = (_count(content, holder, name) for name in ("prompt_tokens", "completion_tokens"))
    return None if prompt is None or completion is None else prompt + completion


def _generated(content: Mapping[str, Any], holder: Mapping[str, Any], rows: int) -> int:
    """Count the last rows that are of generated tokens; all, where the response does not say it."""
    if "prompt_routed_experts" in content:
        return rows
    completion, prompt = (_count(content, holder, name) for name in ("completion_tokens", "prompt_tokens"))
    alone = len(_list(content.get("choices"))) < 2
    if completion is not None and alone:
        generated = completion - 1
    elif prompt is not None:
        generated = rows - prompt
    else:
        return rows
    if not 0 <= generated <= rows:
        raise HeatError(f"{_FIELD} has {rows} rows, fewer than the tokens that the response counts")
    return generated


def _count(content: Mapping[str, Any], holder: Mapping[str, Any], name: str) -> int | None:
    places = (holder, content.get("meta_info"), content.get("usage"))
    for place in places:
        value = place.get(name) if isinstance(place, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _moe_layers(chosen_KLC: Array) -> list[int]:
    """Layers with experts: buffers have a row for dense layers too, which is never written: one number throughout."""
    first_L = chosen_KLC[0, :, 0]
    same_L = (chosen_KLC == first_L[None, :, None]).all(axis=(0, 2))
    if chosen_KLC.shape[2] == 1:
        same_L &= first_L < 0
    moe: list[int] = np.flatnonzero(~same_L).tolist()
    return moe


def _check_distinct(chosen_KLC: Array) -> None:
    """Raise ``HeatError`` where a token chooses an expert twice: then the numbers are not what they are taken for."""
    ordered_KLC = np.sort(chosen_KLC, axis=2)
    twice = (ordered_KLC[..., 1:] == ordered_KLC[..., :-1]) & (ordered_KLC[..., 1:] >= 0)
    if twice.any():
        token, layer, choice = np.argwhere(twice)[0]
        raise HeatError(
            f"token {token} chooses expert {ordered_KLC[token, layer, choice]} twice in layer {layer}: "
            f"are there really {chosen_KLC.shape[2]} choices in each layer?"
        )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


RECORDS = (_is_megatron_record, _trace_of_megatron_records)
RESPONSES = (_is_response, _trace_of_responses)
FOLDER = (_is_megatron_folder, _trace_of_megatron_folder)
"""Recognisers and readers of each form."""
