"""Placement files: numpy files with tables, and the files that engines load at start-up."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import yaml

from eplb_core.atomic_write import write_atomically
from eplb_core.heat.window import HeatError
from eplb_core.placement import Int32, Placement, PlacementError, checked_foreign
from eplb_service.io.containers import (
    Array,
    read_json,
    read_npy,
    read_npz,
    read_torch,
    records_of,
    reporting_damage,
)
from eplb_service.io.named_arrays import LAYER_NUMBERS, ReadAs, listed

Format = Literal["npz", "vllm-ascend", "sglang", "tensorrt-llm", "vllm"]
"""Format of a placement file: numpy, or the engine that loads it."""
FORMATS: tuple[Format, ...] = get_args(Format)

_READERS = {".npz": read_npz, ".npy": read_npy, ".pt": read_torch, ".pth": read_torch}
_MAX_TEXT_BYTES = 256 << 20
_VLLM_RECORD = "eplb_initial_mapping"
"""Type of the record with the placement in vLLM's file."""
_SGLANG = "physical_to_logical_map"
"""Name of the array with the expert in each slot in SGLang's files."""
_NAMES = ("phy2log", _SGLANG, "placement")
"""Accepted names of the array with the expert in each slot."""


class _Rows(NamedTuple):
    """Rows of a placement file.

    Parameters
    ----------
    phy2log
        Expert in each slot, ``[L, R, S]`` or ``[L, P]``.
    numbers
        Layer number of each row, or ``None`` if the file has no numbers.
    of_model
        True if ``numbers`` are the model's own. Otherwise they count the MoE layers from 0.
    """

    phy2log: Array
    numbers: Sequence[int] | None = None
    of_model: bool = True


def read_placement(
    path: Path, experts: int, ranks: int, layer_numbers: Sequence[int] | None = None
) -> Placement:
    """Read a placement from an ``.npy`` or ``.pt`` file, or from any file that ``write_placement`` can write.

    Parameters
    ----------
    path
        Placement file. Numpy files contain ``phy2log`` as ``[L, R, S]``, or as ``[L, R*S]`` as in vLLM.
    experts
        Number of experts E of the deployment.
    ranks
        Number of ranks R of the deployment.
    layer_numbers
        The model's own numbers of the MoE layers to read. If the file has layer numbers, its rows are selected by
        number. Other rows, such as a draft layer's, are skipped. Without ``layer_numbers``, all rows are read.

    Returns
    -------
    Placement
        The validated placement.

    Raises
    ------
    PlacementError
        If the file cannot be read or does not contain a placement of this shape. The error message names the file.
    """
    placed_LRS = read_foreign(path, experts, ranks, layer_numbers)
    try:
        return Placement(placed_LRS, experts)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from error


def read_foreign(path: Path, experts: int, ranks: int, layer_numbers: Sequence[int] | None = None) -> Int32:
    """Read a placement that may come from a different balancer and return it, int32 ``[L, R, S]``.

    In contrast to ``read_placement``, a rank may have two replicas of an expert, and a slot may be empty (-1). The
    parameters and exceptions are the same.
    """
    try:
        phy2log = _of_layers(_read_rows(path), layer_numbers)
        if phy2log.ndim == 2 and phy2log.shape[1] % ranks == 0:
            phy2log = phy2log.reshape(phy2log.shape[0], ranks, -1)
        if phy2log.ndim == 3 and phy2log.shape[1] != ranks:
            raise PlacementError(f"places experts on {phy2log.shape[1]} ranks; expected {ranks} ranks")
        return checked_foreign(phy2log, experts)
    except (HeatError, PlacementError) as error:
        raise PlacementError(f"{path}: {error}") from error


def _of_layers(rows: _Rows, layer_numbers: Sequence[int] | None) -> Array:
    """Return the rows for these layer numbers. Raises ``PlacementError`` naming the missing layers."""
    phy2log = rows.phy2log
    numbers = rows.numbers
    if phy2log.ndim < 2:
        return phy2log
    if numbers is None:
        by_number = layer_numbers and len(phy2log) > max(*layer_numbers, len(layer_numbers))
        return phy2log[list(layer_numbers)] if layer_numbers and by_number else phy2log
    if not layer_numbers:
        if list(numbers) != list(range(numbers[0], numbers[0] + len(numbers))):
            raise PlacementError(
                f"places layers {listed(numbers)}, which cannot be matched to the trace's layers, because the trace's "
                "layers have no numbers"
            )
        return phy2log
    trace_numbers = list(layer_numbers) if rows.of_model else list(range(len(layer_numbers)))
    row_of = {number: row for row, number in enumerate(numbers)}
    if missing := [number for number in trace_numbers if number not in row_of]:
        raise PlacementError(
            f"has no placement for layers {listed(missing)}: the trace has layers {listed(trace_numbers)}, but the "
            f"file has {listed(numbers)}"
        )
    return phy2log[[row_of[number] for number in trace_numbers]]


def read_map(path: Path) -> ReadAs:
    """Read the map for tokens by slot: the expert in each slot, and the layer numbers if the file has them.

    Raises ``HeatError`` or ``PlacementError``. The message does not name the path.
    """
    rows = _read_rows(path)
    return ReadAs(
        phy2log=rows.phy2log, map_layers=tuple(rows.numbers or ()), map_counts_moe=not rows.of_model
    )


def _read_rows(path: Path) -> _Rows:
    """Read the rows of any placement file. Raises ``HeatError`` or ``PlacementError``; the message omits the path."""
    try:
        if path.suffix in _READERS:
            return _rows_of(_READERS[path.suffix](path))
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise PlacementError("is larger than 256 MiB, the limit for text placement files")
        if path.suffix in (".yaml", ".yml"):
            with reporting_damage("YAML document"):
                return _rows_of(yaml.safe_load(path.read_bytes()))
        if path.suffix == ".jsonl":
            records = [
                record
                for _, record in records_of(read_json(path))
                if record.get("record_type") == _VLLM_RECORD
            ]
            if len(records) != 1:
                raise PlacementError(f"holds {len(records)} records of type {_VLLM_RECORD}; expected one")
            return _rows_of(records[0])
        return _rows_of(read_json(path))
    except OSError as error:
        raise PlacementError(f"cannot be read ({error.strerror or error})") from error


def placement_format(path: Path, format: str | None = None) -> Format:
    """Return the format to write to ``path``.

    This is ``format`` if given, and otherwise the first format that uses the suffix, such as vLLM-Ascend's for
    ``.json``. Raises ``PlacementError`` if the format does not exist or does not use the suffix.
    """
    if format is not None and format not in FORMATS:
        raise PlacementError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    for name, (suffix, _) in _FORMATS.items():
        if suffix == path.suffix and format in (None, name):
            return name
    suffixes = dict.fromkeys(suffix for name, (suffix, _) in _FORMATS.items() if format in (None, name))
    raise PlacementError(f"{path}: the name must end in {' or '.join(suffixes)} for this format")


def write_placement(
    path: Path,
    placement: Placement,
    log2phy_RLE: Int32,
    format: str | None = None,
    layer_numbers: Sequence[int] | None = None,
    draft_layers: int = 0,
) -> None:
    """Write a placement to an ``.npz`` file (``phy2log`` and ``log2phy``), or to a file that an engine can load.

    Parameters
    ----------
    path
        File to write.
    placement
        Placement of all layers.
    log2phy_RLE
        Tables, int32 ``[R, L, E]``. Only numpy files store them; engines compute their own.
    format
        One of ``FORMATS``. By default, the suffix of ``path`` decides (see ``placement_format``).
    layer_numbers
        The model's own numbers for the placement's layers, which SGLang and TensorRT-LLM use. By default 0, 1, 2, ...
    draft_layers
        Number of draft (MTP) layers after the model's last layer, which TensorRT-LLM and vLLM-Ascend also count. Their
        heat is unknown, so each of them has the experts in order, starting over at expert 0 in the redundant slots.

    Raises
    ------
    PlacementError
        If the suffix does not match the format, or if the layer numbers are not increasing, one per layer.
    OutputError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> placement = Placement.linear(layers=1, experts=4, ranks=2, slots=3)
    >>> file = Path(tempfile.mkdtemp()) / "placement.json"
    >>> write_placement(file, placement, placement.default_log2phy(), "sglang")
    >>> print(file.read_text().strip())
    {"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]]}
    >>> read_placement(file, experts=4, ranks=2).phy2log_LRS
    array([[[0, 1, 2],
            [3, 0, 1]]], dtype=int32)
    """
    numbers = list(map(int, layer_numbers or range(placement.layers)))
    if len(numbers) != placement.layers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise PlacementError(
            f"the layer numbers are {numbers}; expected {placement.layers} increasing, non-negative numbers"
        )
    _, document_of = _FORMATS[placement_format(path, format)]
    if draft_layers:
        placement, log2phy_RLE = _with_draft_layers(placement, log2phy_RLE, draft_layers)
        numbers += range(numbers[-1] + 1, numbers[-1] + 1 + draft_layers)
    document = document_of(placement, numbers)
    if path.suffix == ".npz":
        if layer_numbers:
            document[LAYER_NUMBERS] = np.array(numbers)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **document, log2phy=log2phy_RLE)
        content = buffer.getvalue()
    elif path.suffix == ".yaml":
        content = yaml.safe_dump(document, default_flow_style=None, sort_keys=False).encode()
    else:
        content = (json.dumps(document) + "\n").encode()
    write_atomically(path, content)


def _with_draft_layers(placement: Placement, log2phy_RLE: Int32, count: int) -> tuple[Placement, Int32]:
    """Return the placement and tables with ``count`` additional layers that have the experts in order."""
    in_order_P = np.arange(placement.ranks * placement.slots, dtype=np.int32) % placement.experts
    rows_DRS = np.tile(in_order_P.reshape(1, placement.ranks, -1), (count, 1, 1))
    drafts = Placement(rows_DRS, placement.experts)
    tables_RDE = drafts.default_log2phy()
    if log2phy_RLE.ndim == 4:
        tables_RDE = np.repeat(tables_RDE[..., None], log2phy_RLE.shape[3], axis=3)
    extended = Placement(np.concatenate([placement.phy2log_LRS, rows_DRS]), placement.experts)
    return extended, np.concatenate([log2phy_RLE, tables_RDE], axis=1)


def _numpy_document(placement: Placement, _numbers: Sequence[int]) -> dict[str, Any]:
    return {"phy2log": placement.phy2log_LRS}


def _expert_map_document(placement: Placement, _numbers: Sequence[int]) -> dict[str, Any]:
    """Return vLLM-Ascend's expert map: the experts of each layer and device (rank), in slot order."""
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


def _sglang_document(placement: Placement, numbers: Sequence[int]) -> dict[str, Any]:
    """Return SGLang's ``--init-expert-location``: ``physical_to_logical_map``, with one row per layer of the model.

    SGLang looks up a layer by the model's own number, so dense layers need a row as well. Their rows have the experts
    in order, as in SGLang's own trivial map.
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    rows = np.tile(np.arange(phy2log_LP.shape[1]) % placement.experts, (numbers[-1] + 1, 1))
    rows[list(numbers)] = phy2log_LP
    return {"physical_to_logical_map": rows.tolist()}


def _tensorrt_llm_document(placement: Placement, numbers: Sequence[int]) -> dict[str, Any]:
    """Return TensorRT-LLM's load-balancer file: the expert in each slot by the model's own layer number.

    ``layer_updates_per_iter`` is 0, so that TensorRT-LLM does not change the placement.
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    return {
        "num_slots": phy2log_LP.shape[1],
        "layer_updates_per_iter": 0,
        "initial_global_assignments": dict(zip(numbers, phy2log_LP.tolist(), strict=True)),
    }


def _vllm_document(placement: Placement, _numbers: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's record of an initial mapping. It counts the MoE layers from 0.

    References
    ----------
    https://github.com/vllm-project/vllm/pull/41141
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    return {
        "record_type": _VLLM_RECORD,
        "version": 1,
        "num_redundant_experts": phy2log_LP.shape[1] - placement.experts,
        "num_slots": phy2log_LP.shape[1],
        "initial_global_assignments": {str(layer): row for layer, row in enumerate(phy2log_LP.tolist())},
    }


_FORMATS: dict[Format, tuple[str, Callable[[Placement, Sequence[int]], dict[str, Any]]]] = {
    "npz": (".npz", _numpy_document),
    "vllm-ascend": (".json", _expert_map_document),
    "sglang": (".json", _sglang_document),
    "tensorrt-llm": (".yaml", _tensorrt_llm_document),
    "vllm": (".jsonl", _vllm_document),
}
SUFFIXES = tuple(dict.fromkeys(suffix for suffix, _ in _FORMATS.values()))
"""Suffixes of the files that can be written. Only ``.npz`` files have tables."""


def _rows_of(document: object) -> _Rows:
    """Return the rows of a document in any of these formats, or of the tuple that DeepSeek's EPLB returns.

    Raises ``HeatError`` or ``PlacementError`` if the document is not a placement.
    """
    if isinstance(document, tuple) and document:
        document = document[0]
    if isinstance(document, np.ndarray):
        return _Rows(document)
    with reporting_damage("placement, in which all layers and devices list the same number of experts"):
        if isinstance(document, Mapping):
            for name in _NAMES:
                if name in document:
                    return _rows_of_array(document, name)
            if "layer_list" in document:
                return _rows_of_expert_map(document["layer_list"])
            if "initial_global_assignments" in document:
                return _rows_of_assignments(document)
    content = type(document).__name__
    if isinstance(document, Mapping):
        content = ", ".join(map(str, list(document)[:8])) or "nothing"
    raise PlacementError(
        "is not a placement: expected phy2log (numpy, DeepSeek), layer_list (vLLM-Ascend), physical_to_logical_map "
        f"(SGLang) or initial_global_assignments (TensorRT-LLM, vLLM); found {content}"
    )


def _rows_of_array(document: Mapping[Any, Any], name: str) -> _Rows:
    """Return the rows of a numpy or torch file, or of SGLang's file. May raise any exception."""
    rows = np.array(document[name])
    # SGLang's own file has one row per layer of the model, in the order of the layer numbers.
    implied = range(len(rows)) if isinstance(document[name], list) and name == _SGLANG else None
    numbers = document.get(LAYER_NUMBERS, implied)
    return _Rows(rows, None if numbers is None else _checked_numbers(numbers, len(rows)))


def _rows_of_expert_map(layers: list[dict[str, Any]]) -> _Rows:
    """Return the rows of vLLM-Ascend's expert map. May raise any exception."""
    numbers = _numbers_of(layers, "layer_id")
    rows = [
        [device["device_expert"] for device in _in_order(layer["device_list"], "device_id")]
        for layer in _in_order(layers, "layer_id", numbers)
    ]
    return _Rows(np.array(rows), sorted(numbers), _are_of_model(numbers))


def _rows_of_assignments(document: Mapping[Any, Any]) -> _Rows:
    """Return the rows of TensorRT-LLM's or vLLM's file. May raise any exception."""
    assigned = {int(number): row for number, row in document["initial_global_assignments"].items()}
    numbers = sorted(assigned)
    of_model = "record_type" not in document or _are_of_model(numbers)
    return _Rows(np.array([assigned[number] for number in numbers]), numbers, of_model)


def _are_of_model(numbers: Sequence[int]) -> bool:
    """Return True if layer numbers are the model's own.

    Engines that count only the MoE layers number them consecutively from 0.
    """
    return sorted(numbers) != list(range(len(numbers)))


def _checked_numbers(layer_numbers: Any, count: int) -> list[int]:
    """Return layer numbers as a list. Raises ``ValueError`` unless there are ``count`` increasing numbers."""
    numbers = [int(number) for number in layer_numbers]
    if len(numbers) != count or numbers != sorted(set(numbers)) or (numbers and numbers[0] < 0):
        raise ValueError(f"its {LAYER_NUMBERS} are {numbers[:8]}; expected {count} increasing numbers")
    return numbers


def _numbers_of(entries: list[dict[str, Any]], key: str) -> list[int]:
    """Return each entry's number, or its index if no entry has a number, as in vLLM-Ascend's own tests."""
    if not any(key in entry for entry in entries):
        return list(range(len(entries)))
    numbers = [int(entry[key]) for entry in entries]
    if len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise ValueError(f"its {key}s are {numbers[:8]}; expected distinct, non-negative numbers")
    return numbers


def _in_order(
    entries: list[dict[str, Any]], key: str, numbers: list[int] | None = None
) -> list[dict[str, Any]]:
    """Return the entries sorted by number.

    Parameters
    ----------
    entries
        Layers or devices.
    key
        Field with an entry's number.
    numbers
        Number of each entry. If omitted, the numbers in the entries must be 0, 1, 2, ...

    Raises
    ------
    ValueError
        If there are no entries, or their numbers are not 0, 1, 2, ...
    """
    order = _numbers_of(entries, key) if numbers is None else numbers
    if not entries or (numbers is None and sorted(order) != list(range(len(order)))):
        raise ValueError(f"its {key}s are {sorted(order)[:8]}; expected 0, 1, 2, …")
    return [entries[index] for index in np.argsort(order)]
