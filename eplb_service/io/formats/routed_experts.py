"""Readers for the experts that each token chose: Megatron's router traces, and the responses of engines.

Megatron writes JSON Lines, one file per rank, if ``--moe-routing-trace-path`` is set. Each record covers one layer of
one step on one rank, with ``top_indices`` of shape ``[tokens, choices]``. In training, there is one record per
microbatch. The reader sums the ranks. It skips the layers of multi-token prediction (``block`` is ``mtp``), which are
not part of the model.

vLLM (``--enable-return-routed-experts``) adds the experts to each choice of a response, as an ``.npy`` in base64.
SGLang (``return_routed_experts``) adds them to ``meta_info`` or ``sglext``, as int32 in base64 without a shape. Lists
of numbers are accepted as well. Each row is a token that was fed to the model: the tokens of the prompt, and the
generated tokens except the last. Only the generated tokens become steps, because the steps represent decoding.

References
----------
``megatron/core/transformer/moe/router_trace.py``; https://docs.vllm.ai/en/latest/training/routed_experts/;
``sglang/srt/state_capturer/routed_experts.py``.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    reporting_damage,
    whole_number,
)
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.routes import moe_layers, trace_of_routes
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts, numbered

RANK_FILE = r"router_trace_rank(?P<rank>\d+)\.jsonl"
"""Pattern for the name of Megatron's file with the tokens of one rank."""
_RANK_FILE = "router_trace_rank%d.jsonl"
_MAX_EXPERTS = 1 << 20
_FIELD = "routed_experts"
_EXTENSIONS = ("meta_info", "sglext")
"""Fields of SGLang's responses that may contain the experts."""


def _is_megatron_record(content: Mapping[str, Any]) -> bool:
    """Return True if a record is part of Megatron's router trace."""
    return "top_indices" in content and "layer" in content and "step" in content


def _is_megatron_folder(folder: Path) -> bool:
    """Return True if a folder contains the files of Megatron's router trace."""
    return any(folder.glob("router_trace_rank*.jsonl"))


def _trace_of_megatron_folder(folder: Path, read_as: ReadAs) -> ArrayTrace:
    """Build the trace from the files of all ranks. Raises ``HeatError`` if the file of a rank is missing or damaged."""

    def records() -> Iterator[Record]:
        for file in files_of_ranks(folder, _RANK_FILE).values():
            for location, content in records_of(read_json(file)):
                yield f"{file.name}, {location}", content

    return _trace_of_megatron_records(records(), read_as)


def _trace_of_megatron_records(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """Build the trace from Megatron's records.

    Steps that some rank did not record in every layer are left out, and the trace's origin gives their number. Unless
    the user provides the number of experts, it is the largest chosen expert plus one. Raises ``HeatError`` if no step
    is complete, or if a record is invalid.
    """
    read_as.refuse_unused("a Megatron router trace", "experts")
    chosen: dict[tuple[int, int], list[Array]] = defaultdict(list)
    reporters: dict[int, set[tuple[int, int]]] = defaultdict(set)
    has_prediction = False
    for location, content in records:
        if content.get("block") == "mtp":
            has_prediction = True
            continue
        step, layer, rank = (whole_number(content, name, location) for name in ("step", "layer", "rank"))
        axes = ("tokens", "choices")
        chosen_KC = counts_of(content.get("top_indices"), "top_indices", location, axes, maximum=_MAX_EXPERTS)
        chosen[step, layer].append(chosen_KC.astype(np.int64))
        reporters[step].add((rank, layer))
    all_reporters = set().union(*reporters.values())
    steps = [step for step in sorted(reporters) if reporters[step] == all_reporters]
    choices = [chosen_KC for arrays in chosen.values() for chosen_KC in arrays if chosen_KC.size]
    if not steps or not choices:
        raise HeatError("has no step that all ranks recorded in all layers")
    chosen_experts = 1 + max(int(chosen_KC.max()) for chosen_KC in choices)
    experts = read_as.experts or chosen_experts
    if chosen_experts > experts:
        raise HeatError(f"refers to expert {chosen_experts - 1}, but there are only {experts} experts")
    layers = sorted({layer for _, layer in all_reporters})
    ranks = len({rank for rank, _ in all_reporters})
    origin = f"Megatron router trace of {ranks} rank{'s' if ranks > 1 else ''}"
    incomplete = len(reporters) - len(steps)
    origin += f", {incomplete} incomplete steps left out" if incomplete else ""
    origin += ", without multi-token prediction" if has_prediction else ""
    origin += "" if read_as.experts else f", {experts} experts, inferred from the highest expert id"
    facts = TraceFacts(origin, top_k=choices[0].shape[1], layer_numbers=numbered(layers))
    tokens_T = np.array([sum(map(len, chosen[step, layers[0]])) for step in steps], dtype=np.int64)
    heat_TLE = _heat_of_choices(chosen, steps, layers, experts)
    return ArrayTrace(heat_TLE, facts, tokens_T, states_layers=True)


def _heat_of_choices(
    chosen: Mapping[tuple[int, int], list[Array]], steps: Sequence[int], layers: Sequence[int], experts: int
) -> Int64:
    """Return the tokens by expert, int64 ``[T, L, E]``.

    Parameters
    ----------
    chosen
        Chosen experts of each rank and microbatch, ``[tokens, choices]``, keyed by step and layer.
    steps
        Steps to count.
    layers
        Layers to count.
    experts
        Number of experts E.
    """
    check_fits_memory(8 * len(steps) * len(layers) * experts)
    heat_TLE = np.zeros((len(steps), len(layers), experts), dtype=np.int64)
    for row, step in enumerate(steps):
        for column, layer in enumerate(layers):
            ids = np.concatenate([chosen_KC.ravel() for chosen_KC in chosen[step, layer]])
            heat_TLE[row, column] = np.bincount(ids, minlength=experts)
    return heat_TLE


def _is_response(content: Mapping[str, Any]) -> bool:
    """Return True if a record is a response that contains its tokens' experts.

    Outside a response, a list named ``routed_experts`` is an array of routes.
    """
    return any(True for _ in _returned(content)) and not isinstance(content.get(_FIELD), list)


def _trace_of_responses(records: Iterable[Record], read_as: ReadAs) -> ArrayTrace:
    """Return the trace of decoding all responses concurrently, in file order.

    Raises ``HeatError`` naming the first response that is damaged, or the option that the user must set.
    """
    read_as.refuse_unused(
        "a file of responses with each token's experts", "experts", "batch", "top_k", makes="routes"
    )
    requests: list[Array] = []
    prompts = "included"
    for location, content in records:
        for holder, value in _returned(content):
            prompt = _count(content, holder, "prompt_tokens")
            completion = _count(content, holder, "completion_tokens")
            tokens = None if prompt is None or completion is None else prompt + completion
            chosen_KLC = _chosen(value, location, tokens, read_as.top_k)
            generated = _generated(content, prompt, completion, len(chosen_KLC))
            same_shape = not requests or chosen_KLC.shape[1:] == requests[0].shape[1:]
            if not same_shape or not 0 <= generated <= len(chosen_KLC):
                raise HeatError(
                    f"{location} has routes of shape {list(chosen_KLC.shape)} (rows, layers, choices): the layers or "
                    "choices differ from those of the other responses, or there are fewer rows than tokens"
                )
            if generated < len(chosen_KLC) or "prompt_routed_experts" in content:
                prompts = "left out"
            requests.append(chosen_KLC[len(chosen_KLC) - generated :])
    if not sum(map(len, requests)):
        raise HeatError(
            "has no generated token with experts; the last token of a response is never fed to the model"
        )
    chosen_KLC = np.concatenate(requests).astype(np.int64)
    moe = moe_layers(chosen_KLC)
    if not moe:
        raise HeatError("has no experts, because every layer looks like a dense one")
    _check_distinct(chosen_KLC[:, moe])
    dense = chosen_KLC.shape[1] - len(moe)
    origin = f"each token's experts in an engine's responses, prompts {prompts}"
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
    """Yield each mapping in a response that contains experts, together with these experts."""
    for choice in (content, *_choices(content)):
        for holder in (choice, *(choice.get(name) for name in _EXTENSIONS)):
            if isinstance(holder, Mapping) and holder.get(_FIELD) is not None:
                yield holder, holder[_FIELD]


def _choices(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the choices of a response."""
    choices = content.get("choices")
    return [choice for choice in choices if isinstance(choice, Mapping)] if isinstance(choices, list) else []


def _chosen(value: object, location: str, tokens: int | None, top_k: int | None) -> Array:
    """Return the chosen experts, ``[rows, L, C]``.

    Parameters
    ----------
    value
        Experts as a nested list, as an ``.npy`` in base64, or as int32 in base64.
    location
        Location of the response, for error messages.
    tokens
        Tokens of the prompt and the completion, or ``None`` if unknown.
    top_k
        Experts per token, or ``None`` if unknown.
    """
    if isinstance(value, str):
        with reporting_damage(f"{_FIELD} in base64"):
            content = base64.b64decode(value, validate=True)
            if content.startswith(b"\x93NUMPY"):
                value = read_npy_bytes(content)
            else:
                value = _shaped(np.frombuffer(content, "<i4"), tokens, top_k)
    axes = ("tokens", "layers", "choices")
    chosen_KLC = counts_of(value, _FIELD, location, axes, minimum=-1, maximum=_MAX_EXPERTS)
    if top_k is not None and chosen_KLC.shape[2] != top_k:
        raise HeatError(f"{location} has {chosen_KLC.shape[2]} choices per token, but --top-k is {top_k}")
    return chosen_KLC


def _shaped(numbers: Array, tokens: int | None, top_k: int | None) -> Array:
    """Reshape SGLang's flat array to ``[rows, L, C]``.

    There is one row per token except the last. The user provides the number of choices, which implies the number of
    layers.
    """
    if tokens is None:
        raise HeatError(f"{_FIELD} has no shape, and prompt_tokens or completion_tokens is missing")
    rows = tokens - 1
    if rows < 1 or numbers.size % rows:
        raise HeatError(
            f"{_FIELD} has no shape, and its {numbers.size} numbers do not match {tokens} tokens (prompt_tokens "
            "plus completion_tokens; the last token has no experts); request the experts from the start of the "
            "sequence (routed_experts_start_len 0)"
        )
    row_size = numbers.size // rows
    if top_k is None or row_size % top_k:
        raise HeatError(
            f"{_FIELD} has {row_size} numbers per token and no shape; set --top-k to the number of experts that each "
            f"token chooses in a layer, a divisor of {row_size}"
        )
    return numbers.reshape(rows, row_size // top_k, top_k)


def _generated(content: Mapping[str, Any], prompt: int | None, completion: int | None, rows: int) -> int:
    """Return the number of rows for generated tokens, which are the last rows.

    Parameters
    ----------
    content
        Response.
    prompt
        Tokens of the prompt, or ``None`` if unknown.
    completion
        Tokens of the completion, or ``None`` if unknown.
    rows
        Number of rows. If the response has no token counts, this number is returned.
    """
    if "prompt_routed_experts" in content:
        return rows
    if completion is not None and len(_choices(content)) < 2:
        return completion - 1
    return rows if prompt is None else rows - prompt


def _count(content: Mapping[str, Any], holder: Mapping[str, Any], name: str) -> int | None:
    """Return one of a response's token counts, or ``None`` if the response does not have it.

    Parameters
    ----------
    content
        Response.
    holder
        Mapping that contains the experts, searched first.
    name
        Name of the count.
    """
    for mapping in (holder, content.get("meta_info"), content.get("usage")):
        if isinstance(mapping, Mapping) and isinstance(mapping.get(name), int):
            return whole_number(mapping, name, "the response")
    return None


def _check_distinct(chosen_KLC: Array) -> None:
    """Raise ``HeatError`` if a token chooses an expert twice, which means that the shape is wrong."""
    ordered_KLC = np.sort(chosen_KLC, axis=2)
    if ((ordered_KLC[..., 1:] == ordered_KLC[..., :-1]) & (ordered_KLC[..., 1:] >= 0)).any():
        raise HeatError(
            f"a token chooses an expert twice, so {chosen_KLC.shape[2]} choices per layer is probably wrong; "
            "check --top-k"
        )


RECORDS = (_is_megatron_record, _trace_of_megatron_records)
RESPONSES = (_is_response, _trace_of_responses)
FOLDER = (_is_megatron_folder, _trace_of_megatron_folder)
"""Functions that recognise and read each kind of file."""
