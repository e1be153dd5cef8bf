"""Placements on disk: numpy files, and the expert_map JSON that vLLM-Ascend starts from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.atomic_write import write_atomically
from eplb_service.heat.trace import load_array
from eplb_service.heat.window import HeatError
from eplb_service.placement import Int32, Placement, PlacementError

SUFFIXES = (".npz", ".json")
"""What ``write_placement`` writes: numpy with tables, or vLLM-Ascend's expert_map, which has none."""


def read_placement(path: Path, experts: int, ranks: int) -> Placement:
    """Placement of ``experts`` on ``ranks`` from ``.npz``, ``.npy`` or vLLM-Ascend's expert_map ``.json``.

    A numpy file holds ``phy2log`` as ``[L, R, S]`` or, in vLLM's shape, ``[L, R*S]``. Raises
    ``PlacementError`` naming the file where it cannot be read or is no placement of this shape.
    """
    try:
        phy2log = _read_json(path) if path.suffix == ".json" else load_array(path, ("phy2log",))
        if phy2log.ndim == 2 and phy2log.shape[1] % ranks == 0:
            phy2log = phy2log.reshape(phy2log.shape[0], ranks, -1)
        if phy2log.ndim == 3 and phy2log.shape[1] != ranks:
            raise PlacementError(f"places on {phy2log.shape[1]} ranks, expected {ranks}")
        return Placement(phy2log, experts)  # type: ignore[arg-type]
    except (HeatError, PlacementError) as error:
        raise PlacementError(f"{path}: {error}") from error


def write_placement(path: Path, placement: Placement, log2phy_RLE: Int32) -> None:
    """Write a placement by suffix: ``.npz`` (``phy2log``, ``log2phy``) or vLLM-Ascend's expert_map ``.json``.

    The JSON has no place for tables: its host makes its own. Raises ``OutputError`` where the disk refuses.
    """
    if path.suffix == ".json":
        write_atomically(path, json.dumps(expert_map_document(placement)).encode())
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, phy2log=placement.phy2log_LRS, log2phy=log2phy_RLE)
    write_atomically(path, buffer.getvalue())


def expert_map_document(placement: Placement) -> dict[str, Any]:
    """The placement as vLLM-Ascend's expert_map: experts of each layer and device (rank), in slot order."""
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


def _read_json(path: Path) -> npt.NDArray[np.generic]:
    try:
        document = json.loads(path.read_bytes())
        layers = _in_order(document["layer_list"], "layer_id")
        rows = [
            [device["device_expert"] for device in _in_order(layer["device_list"], "device_id")]
            for layer in layers
        ]
        return np.array(rows)
    except OSError as error:
        raise PlacementError(f"cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlacementError(f"is not JSON, or truncated ({error})") from error
    except KeyError as error:
        raise PlacementError(f"is no expert_map: the key {error} is missing") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, PlacementError):
            raise
        raise PlacementError("is no expert_map: its devices must list equally many experts") from error


def _in_order(entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    ordered = sorted(entries, key=lambda entry: int(entry[key]))
    ids = [entry[key] for entry in ordered]
    if ids != list(range(len(ids))) or not ids:
        raise PlacementError(f"expert_map numbers its {key}s {ids}, expected 0, 1, 2, …")
    return ordered
