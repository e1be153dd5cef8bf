"""Placements as other engines write them down: vLLM-Ascend's expert_map, SGLang's and TensorRT-LLM's start files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eplb_service.io.numpy_file import Array
from eplb_service.placement import Placement, PlacementError


def expert_map_document(placement: Placement) -> dict[str, Any]:
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


def sglang_document(placement: Placement) -> dict[str, Any]:
    """What SGLang's ``--init-expert-location`` takes: ``physical_to_logical_map``, a row a layer."""
    return {"physical_to_logical_map": placement.phy2log_LRS.reshape(placement.layers, -1).tolist()}


def tensorrt_llm_document(placement: Placement, first_layer: int = 0) -> dict[str, Any]:
    """TensorRT-LLM's load-balancer file: slots and their experts by the model's own layer number.

    ``first_layer`` is the number of the first MoE layer in the model. ``layer_updates_per_iter`` is 0: the placement
    stays.
    """
    return {
        "num_slots": placement.ranks * placement.slots,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {
            first_layer + layer: layer_RS.ravel().tolist()
            for layer, layer_RS in enumerate(placement.phy2log_LRS)
        },
    }


def phy2log_of(document: object) -> Array:
    """Slots of any of the three documents, ``[L, R, S]`` or, where it names no ranks, ``[L, R*S]``.

    Raises ``PlacementError`` where it is none of them.
    """
    if not isinstance(document, Mapping):
        raise PlacementError(f"is no placement: holds a {type(document).__name__}, expected a dictionary")
    try:
        if "layer_list" in document:
            return _of_expert_map(document)
        if "physical_to_logical_map" in document:
            return np.array(document["physical_to_logical_map"])
        if "initial_global_assignments" in document:
            layers = document["initial_global_assignments"]
            return np.array([layers[number] for number in sorted(layers)])
    except KeyError as error:
        raise PlacementError(f"is no expert_map: the key {error} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, PlacementError):
            raise
        raise PlacementError(
            "is no placement: all layers and devices must list equally many experts"
        ) from error
    raise PlacementError(
        "is no placement: expected layer_list (vLLM-Ascend), physical_to_logical_map (SGLang) or "
        f"initial_global_assignments (TensorRT-LLM); found {', '.join(map(str, list(document)[:8])) or 'nothing'}"
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
