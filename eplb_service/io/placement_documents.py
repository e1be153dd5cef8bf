"""What engines' placement files hold, made from a placement and read back: a table of their documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eplb_service.io.containers.numpy_file import Array
from eplb_service.placement import Placement, PlacementError

VLLM_RECORD = "eplb_initial_mapping"
"""Type of the one record of vLLM's file that is a placement."""
NAMES = ("phy2log", "physical_to_logical_map", "placement")
"""What the expert in each slot is called."""


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


def sglang_document(placement: Placement, layer_numbers: Sequence[int]) -> dict[str, Any]:
    """What SGLang's ``--init-expert-location`` takes: ``physical_to_logical_map``, a row per layer of the model.

    SGLang looks its layers up by the model's own number, so that dense layers have a row as well: experts in order, as
    SGLang's own trivial map has them.
    """
    phy2log_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    rows = np.tile(np.arange(phy2log_LP.shape[1]) % placement.experts, (layer_numbers[-1] + 1, 1))
    rows[list(layer_numbers)] = phy2log_LP
    return {"physical_to_logical_map": rows.tolist()}


def tensorrt_llm_document(placement: Placement, layer_numbers: Sequence[int]) -> dict[str, Any]:
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


def vllm_document(placement: Placement) -> dict[str, Any]:
    """vLLM's record of an initial mapping (https://github.com/vllm-project/vllm/pull/41141), by MoE layer from 0 on."""
    slots = placement.ranks * placement.slots
    return {
        "record_type": VLLM_RECORD,
        "version": 1,
        "num_redundant_experts": slots - placement.experts,
        "num_slots": slots,
        "initial_global_assignments": {
            str(layer): layer_RS.ravel().tolist() for layer, layer_RS in enumerate(placement.phy2log_LRS)
        },
    }


def phy2log_of(document: object) -> Array:
    """Slots of any of these documents, or of what DeepSeek's EPLB returns; ``[L, R, S]`` or, without ranks, ``[L, P]``.

    Raises
    ------
    PlacementError
        Where it is none of them.
    """
    if isinstance(document, np.ndarray):
        return document
    if isinstance(document, tuple) and len(document) == 3 and isinstance(document[0], np.ndarray):
        return document[0]
    if not isinstance(document, Mapping):
        raise PlacementError(f"is no placement: holds a {type(document).__name__}, expected a dictionary")
    try:
        if "layer_list" in document:
            return _of_expert_map(document)
        for name in NAMES:
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
        raise PlacementError(
            "is no placement: all layers and devices must list equally many experts"
        ) from error
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
