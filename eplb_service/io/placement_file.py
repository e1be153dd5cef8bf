"""Placements on disk: numpy files with tables, and what engines start from."""

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
from eplb_service.io.containers import Array, read_json, read_npy, read_npz, read_torch, records_of, refusing
from eplb_service.io.named_arrays import LAYER_NUMBERS, ReadAs, listed

Format = Literal["npz", "vllm-ascend", "sglang", "tensorrt-llm", "vllm"]
"""Whose file it is."""
FORMATS: tuple[Format, ...] = get_args(Format)

_READERS = {".npz": read_npz, ".npy": read_npy, ".pt": read_torch, ".pth": read_torch}
_MAX_TEXT_BYTES = 256 << 20
_VLLM_RECORD = "eplb_initial_mapping"
"""Type of the one record of vLLM's file that is a placement."""
_SGLANG = "physical_to_logical_map"
_NAMES = ("phy2log", _SGLANG, "placement")
"""Names of the expert in each slot."""


class _Rows(NamedTuple):
    """Expert in each slot, ``[L, R, S]`` or ``[L, P]``, and the numbers of the layers if the file has them.

    ``of_model`` says that these are the model's own numbers; otherwise they count the MoE layers from 0 on.
    """

    phy2log: Array
    numbers: Sequence[int] | None = None
    of_model: bool = True


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
        The model's own numbers of the MoE layers. The rows of these layers are taken, by number if the file has
        numbers; further rows, such as a draft layer's, are left out. Without it all rows are taken.

    Returns
    -------
    Placement
        Checked.

    Raises
    ------
    PlacementError
        Naming the file, where it cannot be read or holds no placement of this shape.
    """
    placed_LRS = read_foreign(path, experts, ranks, layer_numbers)
    try:
        return Placement(placed_LRS, experts)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from error


def read_foreign(path: Path, experts: int, ranks: int, layer_numbers: Sequence[int] | None = None) -> Int32:
    """Read a placement that another balancer may have made: experts twice on a rank, and -1 for an empty slot.

    Returns int32 ``[L, R, S]``. The arguments and errors are those of ``read_placement``.
    """
    try:
        phy2log = _of_layers(_read_rows(path), layer_numbers)
        if phy2log.ndim == 2 and phy2log.shape[1] % ranks == 0:
            phy2log = phy2log.reshape(phy2log.shape[0], ranks, -1)
        if phy2log.ndim == 3 and phy2log.shape[1] != ranks:
            raise PlacementError(f"places on {phy2log.shape[1]} ranks, expected {ranks}")
        return checked_foreign(phy2log, experts)
    except (HeatError, PlacementError) as error:
        raise PlacementError(f"{path}: {error}") from error


def _of_layers(rows: _Rows, layer_numbers: Sequence[int] | None) -> Array:
    """Return the rows of these layers. Raises ``PlacementError``, which names the missing layers."""
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
                f"places the layers {listed(numbers)}, but it is unknown which of them the trace has: the "
                "trace's layers have no numbers"
            )
        return phy2log
    wanted = list(layer_numbers) if rows.of_model else list(range(len(layer_numbers)))
    row_of = {number: row for row, number in enumerate(numbers)}
    if missing := [number for number in wanted if number not in row_of]:
        raise PlacementError(
            f"places the layers {listed(numbers)} and lacks {listed(missing)} of the trace's {listed(wanted)}"
        )
    return phy2log[[row_of[number] for number in wanted]]


def read_map(path: Path) -> ReadAs:
    """Read the map for tokens by slot: the expert in each slot, and the layer numbers if the file has them.

    Raises ``HeatError`` or ``PlacementError``. The message does not name the path.
    """
    rows = _read_rows(path)
    return ReadAs(
        phy2log=rows.phy2log, map_layers=tuple(rows.numbers or ()), map_counts_moe=not rows.of_model
    )


def _read_rows(path: Path) -> _Rows:
    """Read rows and their numbers; raises ``HeatError`` or ``PlacementError`` without the path."""
    try:
        if path.suffix in _READERS:
            return _rows_of(_READERS[path.suffix](path))
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise PlacementError("is more than 256 MiB of text; a placement is not")
        if path.suffix in (".yaml", ".yml"):
            with refusing("YAML"):
                return _rows_of(yaml.safe_load(path.read_bytes()))
        if path.suffix == ".jsonl":
            records = [
                record
                for _, record in records_of(read_json(path))
                if record.get("record_type") == _VLLM_RECORD
            ]
            if len(records) != 1:
                raise PlacementError(f"holds {len(records)} records {_VLLM_RECORD}; expected one")
            return _rows_of(records[0])
        return _rows_of(read_json(path))
    except OSError as error:
        raise PlacementError(f"cannot be read ({error.strerror or error})") from error


def placement_format(path: Path, wanted: str | None = None) -> Format:
    """Return the format to write ``path`` in: ``wanted``, or what its suffix says (``.json`` is vLLM-Ascend's).

    Raises ``PlacementError`` where the two contradict each other.
    """
    if wanted is not None and wanted not in FORMATS:
        raise PlacementError(f"unknown format {wanted!r}; choose one of {', '.join(FORMATS)}")
    for name, (suffix, _) in _FORMATS.items():
        if suffix == path.suffix and wanted in (None, name):
            return name
    suffixes = dict.fromkeys(suffix for name, (suffix, _) in _FORMATS.items() if wanted in (None, name))
    raise PlacementError(f"{path}: the name must end in {' or '.join(suffixes)}, as the format has it")


def write_placement(
    path: Path,
    placement: Placement,
    log2phy_RLE: Int32,
    format: str | None = None,
    layer_numbers: Sequence[int] | None = None,
    draft_layers: int = 0,
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
    draft_layers
        Layers of a draft (MTP) model that follow the last one, as TensorRT-LLM and vLLM-Ascend count them. Nothing is
        known of their heat: each gets a row with the experts in order, and again in order in redundant slots.

    Raises
    ------
    PlacementError
        Where the format and the suffix contradict each other, or the numbers are not one per layer, rising.
    OutputError
        Where the disk refuses.
    """
    numbers = list(map(int, layer_numbers or range(placement.layers)))
    if len(numbers) != placement.layers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise PlacementError(
            f"the numbers of {placement.layers} layers are {numbers}; expected rising ones from 0 on"
        )
    _, make = _FORMATS[placement_format(path, format)]
    if draft_layers:
        placement, log2phy_RLE = _with_draft_layers(placement, log2phy_RLE, draft_layers)
        numbers += range(numbers[-1] + 1, numbers[-1] + 1 + draft_layers)
    document = make(placement, numbers)
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
    """Return placement and tables with rows of experts in order after the last layer."""
    in_order_P = np.arange(placement.ranks * placement.slots, dtype=np.int32) % placement.experts
    rows_DRS = np.tile(in_order_P.reshape(1, placement.ranks, -1), (count, 1, 1))
    drafts = Placement(rows_DRS, placement.experts)
    tables_RDE = drafts.default_log2phy()
    if log2phy_RLE.ndim == 4:
        tables_RDE = np.repeat(tables_RDE[..., None], log2phy_RLE.shape[3], axis=3)
    whole = Placement(np.concatenate([placement.phy2log_LRS, rows_DRS]), placement.experts)
    return whole, np.concatenate([log2phy_RLE, tables_RDE], axis=1)


def _numpy_document(placement: Placement, _numbers: Sequence[int]) -> dict[str, Any]:
    return {"phy2log": placement.phy2log_LRS}


def _expert_map_document(placement: Placement, _numbers: Sequence[int]) -> dict[str, Any]:
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


def _sglang_document(placement: Placement, numbers: Sequence[int]) -> dict[str, Any]:
    """SGLang's ``--init-expert-location``: ``physical_to_logical_map``, a row per layer of the model.

    SGLang looks its layers up by the model's own number, so that dense layers have a row as well: experts in order, as
    SGLang's own trivial map has them.
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    rows = np.tile(np.arange(phy2log_LP.shape[1]) % placement.experts, (numbers[-1] + 1, 1))
    rows[list(numbers)] = phy2log_LP
    return {"physical_to_logical_map": rows.tolist()}


def _tensorrt_llm_document(placement: Placement, numbers: Sequence[int]) -> dict[str, Any]:
    """TensorRT-LLM's load-balancer file: slots and their experts by the model's own layer number.

    ``layer_updates_per_iter`` is 0: the placement stays.
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    return {
        "num_slots": phy2log_LP.shape[1],
        "layer_updates_per_iter": 0,
        "initial_global_assignments": dict(zip(numbers, phy2log_LP.tolist(), strict=True)),
    }


def _vllm_document(placement: Placement, _numbers: Sequence[int]) -> dict[str, Any]:
    """vLLM's record of an initial mapping (https://github.com/vllm-project/vllm/pull/41141), by MoE layer from 0 on."""
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
"""Suffixes that can be written: numpy with tables, or an engine's own file, which has none."""


def _rows_of(document: object) -> _Rows:
    """Rows of any of these documents, or of DeepSeek's EPLB."""
    if isinstance(document, tuple) and document:
        document = document[0]
    if isinstance(document, np.ndarray):
        return _Rows(document)
    found = (
        ", ".join(map(str, list(document)[:8])) if isinstance(document, Mapping) else type(document).__name__
    )
    with refusing("placement in which layers and devices list equally many experts"):
        if isinstance(document, Mapping):
            for name in _NAMES:
                if name in document:
                    rows = np.array(document[name])
                    # SGLang's own file has a row for each layer of the model, by its number.
                    known = range(len(rows)) if isinstance(document[name], list) and name == _SGLANG else None
                    stated = document.get(LAYER_NUMBERS, known)
                    return _Rows(rows, None if stated is None else _checked_numbers(stated, len(rows)))
            if "layer_list" in document:
                layers = document["layer_list"]
                numbers = _numbers_of(layers, "layer_id")
                rows = np.array(
                    [
                        [device["device_expert"] for device in _in_order(layer["device_list"], "device_id")]
                        for layer in _in_order(layers, "layer_id", numbers)
                    ]
                )
                return _Rows(rows, sorted(numbers), _are_of_model(numbers))
            if "initial_global_assignments" in document:
                assigned = {
                    int(number): row for number, row in document["initial_global_assignments"].items()
                }
                numbers = sorted(assigned)
                of_model = "record_type" not in document or _are_of_model(numbers)
                return _Rows(np.array([assigned[number] for number in numbers]), numbers, of_model)
    raise PlacementError(
        "is no placement: expected phy2log (numpy, DeepSeek), layer_list (vLLM-Ascend), physical_to_logical_map "
        f"(SGLang) or initial_global_assignments (TensorRT-LLM, vLLM); found {found or 'nothing'}"
    )


def _are_of_model(numbers: Sequence[int]) -> bool:
    """Return whether numbers are the model's own: engines that count MoE layers begin at 0 and leave none out."""
    return sorted(numbers) != list(range(len(numbers)))


def _checked_numbers(stated: Any, count: int) -> list[int]:
    numbers = [int(number) for number in stated]
    if len(numbers) != count or numbers != sorted(set(numbers)) or (numbers and numbers[0] < 0):
        raise ValueError(f"its {LAYER_NUMBERS} are {numbers[:8]} for {count} layers, expected rising ones")
    return numbers


def _numbers_of(entries: list[dict[str, Any]], key: str) -> list[int]:
    """Return the number that each entry states, or its place if none states one, as in vLLM-Ascend's own tests."""
    if not any(key in entry for entry in entries):
        return list(range(len(entries)))
    numbers = [int(entry[key]) for entry in entries]
    if len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise ValueError(f"its {key}s are {numbers[:8]}, expected different ones from 0 on")
    return numbers


def _in_order(
    entries: list[dict[str, Any]], key: str, numbers: list[int] | None = None
) -> list[dict[str, Any]]:
    """Return entries by their numbers; these are 0, 1, 2, ... unless ``numbers`` are given."""
    found = _numbers_of(entries, key) if numbers is None else numbers
    if not entries or (numbers is None and sorted(found) != list(range(len(found)))):
        raise ValueError(f"its {key}s are {sorted(found)[:8]}, expected 0, 1, 2, …")
    return [entries[place] for place in np.argsort(found)]
