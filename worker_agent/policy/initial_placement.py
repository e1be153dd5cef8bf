"""Read a recorded placement for policy mode to start from, for engines such as vLLM that have no option for this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_BYTES = 256 << 20
_VLLM_RECORD = "eplb_initial_mapping"
"""Type of the record that contains the placement in a ``.jsonl`` file."""


class InitialPlacementError(ValueError):
    """Raised if a file is not a placement for this model and group of ranks. The message names the file."""


def read_initial_placement(
    path: Path, layers: int, ranks: int, slots: int, experts: int, *, first_layer: int = 0
) -> npt.NDArray[np.int64]:
    """Read a placement that ``eplb solve --out`` or ``eplb placement --out`` has written.

    The formats are ``.npz``, the ``.json`` formats of vLLM-Ascend and SGLang, and vLLM's proposed ``.jsonl`` format.
    The file's layers are taken as the model's MoE layers, in order, followed by the layers of its draft model.

    Parameters
    ----------
    path
        Placement file.
    layers
        L, number of MoE layers in the model.
    ranks
        R, number of ranks.
    slots
        S, slots per rank.
    experts
        E, logical experts per layer.
    first_layer
        Row of the model's first layer: 0 for the target model, and the number of its MoE layers for its draft model.

    Returns
    -------
    ndarray
        int64 ``[L, P]``, logical expert in each physical slot, where P is R times S.

    Raises
    ------
    InitialPlacementError
        If the file cannot be read, if its placement has a different shape, or if an expert has no slot. Additional rows
        are accepted only if they list the experts in order, as rows of draft layers do.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "placement.json"
    >>> _ = path.write_text('{"physical_to_logical_map": [[3, 0, 1, 2, 1, 0], [0, 1, 2, 3, 0, 1]]}')
    >>> read_initial_placement(path, layers=1, ranks=2, slots=3, experts=4)
    array([[3, 0, 1, 2, 1, 0]])
    """
    try:
        rows = _rows_of(path)
        return _checked(rows, layers, ranks, slots, experts, first_layer)
    except InitialPlacementError as error:
        raise InitialPlacementError(f"{path}: {error}") from error


def _rows_of(path: Path) -> npt.NDArray[Any]:
    """Return the file's rows, ``[rows, R, S]`` or ``[rows, P]``. The caller adds the path to errors."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InitialPlacementError("is larger than 256 MiB, the limit for placement files")
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                if "phy2log" not in arrays:
                    raise InitialPlacementError("contains no array named phy2log")
                rows: npt.NDArray[Any] = arrays["phy2log"]
                return rows
        if path.suffix == ".jsonl":
            return _rows_of_document(_vllm_record(path.read_text(encoding="utf-8")))
        if path.suffix == ".json":
            return _rows_of_document(json.loads(path.read_text(encoding="utf-8")))
    except InitialPlacementError:
        raise
    except OSError as error:
        raise InitialPlacementError(f"cannot be read ({error.strerror or error})") from error
    except Exception as error:
        # numpy raises many types of errors for a damaged archive, and the structure of a JSON document is unknown.
        raise InitialPlacementError(
            f"is damaged or is not a placement ({error or type(error).__name__})"
        ) from error
    raise InitialPlacementError(
        "must end in .npz, .json or .jsonl; write it with `eplb solve --out` or `eplb placement --out`"
    )


def _vllm_record(text: str) -> Any:
    documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    records = [document for document in documents if document.get("record_type") == _VLLM_RECORD]
    if len(records) != 1:
        raise InitialPlacementError(f"contains {len(records)} records of type {_VLLM_RECORD}; expected one")
    return records[0]


def _rows_of_document(document: Any) -> npt.NDArray[Any]:
    """Return the rows of a JSON document. May raise any exception."""
    if isinstance(document, Mapping):
        if "physical_to_logical_map" in document:
            return np.array(document["physical_to_logical_map"])
        if "initial_global_assignments" in document:
            rows_by_layer = {int(layer): row for layer, row in document["initial_global_assignments"].items()}
            return np.array([rows_by_layer[layer] for layer in sorted(rows_by_layer)])
        if "layer_list" in document:
            ordered = sorted(document["layer_list"], key=lambda layer: layer["layer_id"])
            return np.array([_devices(layer["device_list"]) for layer in ordered])
    raise InitialPlacementError(
        "is not a placement: expected physical_to_logical_map (SGLang), layer_list (vLLM-Ascend) or "
        "initial_global_assignments (vLLM)"
    )


def _devices(devices: list[dict[str, Any]]) -> list[list[int]]:
    return [
        device["device_expert"] for device in sorted(devices, key=lambda device: int(device["device_id"]))
    ]


def _checked(
    rows: npt.NDArray[Any], layers: int, ranks: int, slots: int, experts: int, first_layer: int
) -> npt.NDArray[np.int64]:
    """Return the rows of the model's layers. The caller adds the path to errors."""
    if rows.dtype.kind not in "iu" or rows.ndim not in (2, 3) or rows.size == 0:
        raise InitialPlacementError(
            f"has a placement of type {rows.dtype} and shape {list(rows.shape)}; expected integers [layers, ranks, "
            "slots] or [layers, slots of all ranks]"
        )
    physical = ranks * slots
    expected = f"{ranks} ranks of {slots} slots"
    if rows.ndim == 3 and rows.shape[1:] != (ranks, slots):
        raise InitialPlacementError(
            f"places experts on {rows.shape[1]} ranks of {rows.shape[2]} slots, but this engine has {expected}"
        )
    rows_LP: npt.NDArray[np.int64] = rows.reshape(len(rows), -1).astype(np.int64)
    if rows_LP.shape[1] != physical:
        raise InitialPlacementError(f"has {rows_LP.shape[1]} slots per layer, but this engine has {expected}")
    end = first_layer + layers
    others_LP = rows_LP[end:]
    if len(rows_LP) < end or (others_LP != np.arange(physical) % experts).any():
        raise InitialPlacementError(
            f"has {len(rows_LP)} layers, but the model has {end} MoE layers; create the file from this model's "
            "heat, with an `--out` path that ends in .npz or .jsonl, because these formats leave out dense layers"
        )
    model_LP = rows_LP[first_layer:end]
    if model_LP.min() < 0 or model_LP.max() >= experts:
        raise InitialPlacementError(
            f"refers to expert {model_LP.max() if model_LP.max() >= experts else model_LP.min()}, but the model's "
            f"experts are 0 to {experts - 1}"
        )
    for layer, row_P in enumerate(model_LP):
        missing = np.setdiff1d(np.arange(experts), row_P)
        if missing.size:
            raise InitialPlacementError(f"layer {first_layer + layer}: expert {missing[0]} has no slot")
    return model_LP
