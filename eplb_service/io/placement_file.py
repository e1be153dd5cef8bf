"""Placements on disk: numpy files with tables, and what engines start from."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import yaml

from eplb_service.atomic_write import write_atomically
from eplb_service.heat.window import HeatError
from eplb_service.io.containers.json_lines import read_lines
from eplb_service.io.containers.numpy_file import Array, read_npy, read_npz
from eplb_service.io.containers.torch_file import read_torch
from eplb_service.io.placement_documents import (
    NAMES,
    VLLM_RECORD,
    expert_map_document,
    phy2log_of,
    sglang_document,
    tensorrt_llm_document,
    vllm_document,
)
from eplb_service.placement import Int32, Placement, PlacementError

SUFFIXES = (".npz", ".json", ".yaml", ".jsonl")
"""What ``write_placement`` writes: numpy with tables, or an engine's own file, which has none."""

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
            return phy2log_of(read_torch(path))
        if path.suffix in (".npz", ".npy"):
            magic = b"PK" if path.suffix == ".npz" else b"\x93NUMPY"
            if not head.startswith(magic):
                raise PlacementError(f"is not a numpy {path.suffix} file, or its beginning is damaged")
            return read_npy(path) if path.suffix == ".npy" else _named(read_npz(path))
        if path.stat().st_size > _MOST_TEXT_BYTES:
            raise PlacementError("is more than 256 MiB of text; a placement is not")
        return phy2log_of(_parsed(path))
    except OSError as error:
        raise PlacementError(f"cannot be read ({error.strerror or error})") from error


def placement_format(path: Path, wanted: str | None = None) -> Format:
    """The format to write ``path`` in: ``wanted``, or what its suffix says (``.json`` is vLLM-Ascend's).

    Raises
    ------
    PlacementError
        Where the two contradict each other.
    """
    if wanted is None:
        by_suffix = {suffix: name for name, suffix in reversed(_SUFFIX.items())}
        if path.suffix not in by_suffix:
            raise PlacementError(
                f"{path}: the name must end in {' or '.join(SUFFIXES)}, which says the format"
            )
        return by_suffix[path.suffix]
    for name in FORMATS:
        if name == wanted:
            if path.suffix != _SUFFIX[name]:
                raise PlacementError(
                    f"{path}: the format {name} is written to a name ending in {_SUFFIX[name]}"
                )
            return name
    raise PlacementError(f"unknown format {wanted!r}; choose one of {', '.join(FORMATS)}")


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
    path
        Its suffix chooses the format, ``.json`` that of vLLM-Ascend.
    placement
        All layers.
    log2phy_RLE
        Int32 ``[R, L, E]``, tables; only numpy files hold them, other hosts make their own.
    format
        One of ``FORMATS``, where the suffix does not say enough.
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
        write_atomically(path, buffer.getvalue())
    elif chosen == "tensorrt-llm":
        text = yaml.safe_dump(
            tensorrt_llm_document(placement, numbers), default_flow_style=None, sort_keys=False
        )
        write_atomically(path, text.encode())
    elif chosen == "vllm":
        write_atomically(path, (json.dumps(vllm_document(placement)) + "\n").encode())
    else:
        document = (
            expert_map_document(placement) if chosen == "vllm-ascend" else sglang_document(placement, numbers)
        )
        write_atomically(path, json.dumps(document).encode())


def _checked_numbers(layer_numbers: Sequence[int] | None, layers: int) -> list[int]:
    numbers = list(range(layers)) if not layer_numbers else [int(number) for number in layer_numbers]
    if len(numbers) != layers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise PlacementError(
            f"the model's numbers of {layers} layers are {numbers}; expected rising ones, from 0 on"
        )
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
        raise PlacementError(f"is not YAML, or truncated ({' '.join(str(error).split())})") from error


def _initial_mapping(path: Path) -> object:
    """The one record of vLLM's file that is a placement."""
    found = [
        record.content for record in read_lines(path) if record.content.get("record_type") == VLLM_RECORD
    ]
    if len(found) != 1:
        raise PlacementError(f"holds {len(found)} records {VLLM_RECORD}; expected one")
    return found[0]


def _named(arrays: dict[str, Array]) -> Array:
    for name in NAMES:
        if name in arrays:
            return arrays[name]
    raise PlacementError(f"holds no array named 'phy2log'; found {', '.join(arrays) or 'nothing'}")
