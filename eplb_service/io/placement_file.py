"""Placements on disk: numpy files with tables, and what engines start from."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import yaml

from eplb_service.atomic_write import write_atomically
from eplb_service.heat.window import HeatError
from eplb_service.io.containers import Array, one_line, read_lines, read_npy, read_npz, read_torch
from eplb_service.placement import Int32, Placement, PlacementError

SUFFIXES = (".npz", ".json", ".yaml", ".jsonl")
"""Suffixes that can be written: numpy with tables, or an engine's own file, which has none."""

Format = Literal["npz", "vllm-ascend", "sglang", "tensorrt-llm", "vllm"]
"""Whose file it is."""
FORMATS: tuple[Format, ...] = get_args(Format)
_SUFFIX: dict[Format, str] = {
    "npz": ".npz",
    "vllm-ascend": ".json",
    "sglang": ".json",
    "tensorrt-llm": ".yaml",
    "vllm": ".jsonl",
}

_MOST_TEXT_BYTES = 256 << 20
_VLLM_RECORD = "eplb_initial_mapping"
"""Type of the one record of vLLM's file that is a placement."""
_NAMES = ("phy2log", "physical_to_logical_map", "placement")
"""Names of the expert in each slot."""


def read_placement(
    path: Path, experts: int, ranks: int, layer_numbers: Sequence[int] | None = None
) -> Placement:
    """Read a placement from any file that ``write_placement`` writes, or ``.npy``, or ``.pt``.

    Parameters
    ----------
    path
        A numpy file holds ``phy2log`` as ``[L, R, S]`` or, in vLLM's shape, ``[L, R*S]``.
    experts, ranks
        E and R of the deployment.
    layer_numbers
        The model's own numbers of the MoE layers: of a file that has a row for every layer of the model, as SGLang's,
        these are taken.

    Returns
    -------
    Placement
        Checked.

    Raises
    ------
    PlacementError
        Naming the file, where it cannot be read or holds no placement of this shape.
    """
    try:
        phy2log = read_phy2log(path)
        if layer_numbers and phy2log.ndim > 1 and len(phy2log) > max(*layer_numbers, len(layer_numbers)):
            phy2log = phy2log[list(layer_numbers)]
        if phy2log.ndim == 2 and phy2log.shape[1] % ranks == 0:
            phy2log = phy2log.reshape(phy2log.shape[0], ranks, -1)
        if phy2log.ndim == 3 and phy2log.shape[1] != ranks:
            raise PlacementError(f"places on {phy2log.shape[1]} ranks, expected {ranks}")
        return Placement(phy2log, experts)
    except (HeatError, PlacementError) as error:
        raise PlacementError(f"{path}: {error}") from error


def read_phy2log(path: Path) -> Array:
    """The expert in each slot, as the file has it; raises ``HeatError`` or ``PlacementError`` without the path."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
        if path.suffix in (".pt", ".pth"):
            return _phy2log_of(read_torch(path))
        if path.suffix in (".npz", ".npy"):
            magic = b"PK" if path.suffix == ".npz" else b"\x93NUMPY"
            if not head.startswith(magic):
                raise PlacementError(f"is not a numpy {path.suffix} file, or its beginning is damaged")
            return read_npy(path) if path.suffix == ".npy" else _named(read_npz(path))
        if path.stat().st_size > _MOST_TEXT_BYTES:
            raise PlacementError("is more than 256 MiB of text; a placement is not")
        return _phy2log_of(_parsed(path))
    except OSError as error:
        raise PlacementError(f"cannot be read ({error.strerror or error})") from error


def placement_format(path: Path, wanted: str | None = None) -> Format:
    """Return the format to write ``path`` in: ``wanted``, or what its suffix says (``.json`` is vLLM-Ascend's).

    Raises ``PlacementError`` where the two contradict each other.
    """
    if wanted is None:
        by_suffix = {suffix: name for name, suffix in reversed(_SUFFIX.items())}
        if path.suffix not in by_suffix:
            raise PlacementError(f"{path}: the name must end in {' or '.join(SUFFIXES)}")
        return by_suffix[path.suffix]
    for name in FORMATS:
        if name == wanted and path.suffix == _SUFFIX[name]:
            return name
    if wanted not in FORMATS:
        raise PlacementError(f"unknown format {wanted!r}; choose one of {', '.join(FORMATS)}")
    raise PlacementError(f"{path}: the format {wanted} is written to a name ending in {_SUFFIX[wanted]}")


def write_placement(
    path: Path,
    placement: Placement,
    log2phy_RLE: Int32,
    format: str | None = None,
    layer_numbers: Sequence[int] | None = None,
) -> None:
    """Write a placement: ``.npz`` (``phy2log``, ``log2phy``), or an engine's own file.

    Parameters
    ----------
    path, format
        The suffix chooses the format, ``.json`` that of vLLM-Ascend, unless one of ``FORMATS`` is named.
    placement, log2phy_RLE
        All layers, and int32 ``[R, L, E]`` tables, which only numpy files hold; other hosts make their own.
    layer_numbers
        The model's own numbers of the placement's layers (0, 1, 2, ... where not given), which SGLang and TensorRT-LLM
        count by.

    Raises
    ------
    PlacementError
        Where the format and the suffix contradict each other, or the numbers are not one per layer, rising.
    OutputError
        Where the disk refuses.
    """
    numbers = _checked_numbers(layer_numbers, placement.layers)
    chosen = placement_format(path, format)
    if chosen == "npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, phy2log=placement.phy2log_LRS, log2phy=log2phy_RLE)
        content = buffer.getvalue()
    elif chosen == "tensorrt-llm":
        document = _tensorrt_llm_document(placement, numbers)
        content = yaml.safe_dump(document, default_flow_style=None, sort_keys=False).encode()
    elif chosen == "vllm":
        content = (json.dumps(_vllm_document(placement)) + "\n").encode()
    elif chosen == "vllm-ascend":
        content = json.dumps(_expert_map_document(placement)).encode()
    else:
        content = json.dumps(_sglang_document(placement, numbers)).encode()
    write_atomically(path, content)


def _checked_numbers(layer_numbers: Sequence[int] | None, layers: int) -> list[int]:
    numbers = list(range(layers)) if not layer_numbers else [int(number) for number in layer_numbers]
    if len(numbers) != layers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise PlacementError(f"the numbers of {layers} layers are {numbers}; expected rising ones from 0 on")
    return numbers


def _parsed(path: Path) -> object:
    if path.suffix == ".jsonl":
        return _initial_mapping(path)
    try:
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(path.read_bytes())
        return json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PlacementError(f"is not JSON, or truncated ({error})") from error
    except (yaml.YAMLError, ValueError) as error:
        raise PlacementError(f"is not YAML, or truncated ({one_line(error)})") from error


def _initial_mapping(path: Path) -> object:
    """The one record of vLLM's file that is a placement."""
    found = [content for _, content in read_lines(path) if content.get("record_type") == _VLLM_RECORD]
    if len(found) != 1:
        raise PlacementError(f"holds {len(found)} records {_VLLM_RECORD}; expected one")
    return found[0]


def _named(arrays: dict[str, Array]) -> Array:
    for name in _NAMES:
        if name in arrays:
            return arrays[name]
    raise PlacementError(f"holds no array named 'phy2log'; found {', '.join(arrays) or 'nothing'}")


def _expert_map_document(placement: Placement) -> dict[str, Any]:
    """vLLM-Ascend's expert_map: experts of each layer and device (rank), in slot order."""
    return {
        "moe_layer_count": placement.layers,
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": placement.ranks,
                "device_list": [
                    {"device_id": rank, "device_expert": experts_S.tolist()}
                    for rank, experts_S in enumerate(layer_RS)
                ],
            }
            for layer, layer_RS in enumerate(placement.phy2log_LRS)
        ],
    }


def _sglang_document(placement: Placement, layer_numbers: Sequence[int]) -> dict[str, Any]:
    """SGLang's ``--init-expert-location``: ``physical_to_logical_map``, a row per layer of the model.

    SGLang looks its layers up by the model's own number, so that dense layers have a row as well: experts in order, as
    SGLang's own trivial map has them.
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    rows = np.tile(np.arange(phy2log_LP.shape[1]) % placement.experts, (layer_numbers[-1] + 1, 1))
    rows[list(layer_numbers)] = phy2log_LP
    return {"physical_to_logical_map": rows.tolist()}


def _tensorrt_llm_document(placement: Placement, layer_numbers: Sequence[int]) -> dict[str, Any]:
    """TensorRT-LLM's load-balancer file: slots and their experts by the model's own layer number.

    ``layer_updates_per_iter`` is 0: the placement stays.
    """
    return {
        "num_slots": placement.ranks * placement.slots,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {
            number: layer_RS.ravel().tolist()
            for number, layer_RS in zip(layer_numbers, placement.phy2log_LRS, strict=True)
        },
    }


def _vllm_document(placement: Placement) -> dict[str, Any]:
    """vLLM's record of an initial mapping (https://github.com/vllm-project/vllm/pull/41141), by MoE layer from 0 on."""
    slots = placement.ranks * placement.slots
    return {
        "record_type": _VLLM_RECORD,
        "version": 1,
        "num_redundant_experts": slots - placement.experts,
        "num_slots": slots,
        "initial_global_assignments": {
            str(layer): layer_RS.ravel().tolist() for layer, layer_RS in enumerate(placement.phy2log_LRS)
        },
    }


def _phy2log_of(document: object) -> Array:
    """Slots of any of these documents, or of DeepSeek's EPLB; ``[L, R, S]`` or, without ranks, ``[L, P]``."""
    if isinstance(document, np.ndarray):
        return document
    if isinstance(document, tuple) and len(document) == 3 and isinstance(document[0], np.ndarray):
        return document[0]
    if not isinstance(document, Mapping):
        raise PlacementError(f"is no placement: holds a {type(document).__name__}, expected a dictionary")
    try:
        if "layer_list" in document:
            return _of_expert_map(document)
        for name in _NAMES:
            if name in document:
                return np.array(document[name])
        if "initial_global_assignments" in document:
            layers = document["initial_global_assignments"]
            return np.array([layers[number] for number in sorted(layers, key=int)])
    except KeyError as error:
        raise PlacementError(f"is no expert_map: the key {error} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, PlacementError):
            raise
        raise PlacementError("is no placement: layers and devices must list equally many experts") from error
    raise PlacementError(
        "is no placement: expected layer_list (vLLM-Ascend), physical_to_logical_map (SGLang), phy2log (DeepSeek) or "
        f"initial_global_assignments (TensorRT-LLM, vLLM); found {', '.join(map(str, list(document)[:8])) or 'nothing'}"
    )


def _of_expert_map(document: Mapping[str, Any]) -> Array:
    layers = _in_order(document["layer_list"], "layer_id")
    return np.array(
        [
            [device["device_expert"] for device in _in_order(layer["device_list"], "device_id")]
            for layer in layers
        ]
    )


def _in_order(entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    ordered = sorted(entries, key=lambda entry: int(entry[key]))
    ids = [entry[key] for entry in ordered]
    if ids != list(range(len(ids))) or not ids:
        raise PlacementError(f"expert_map numbers its {key}s {ids}, expected 0, 1, 2, …")
    return ordered
