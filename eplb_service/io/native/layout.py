"""The native trace: a Zarr v3 folder of per-step heat, with the placements that it was counted under.

| array | shape | is |
|---|---|---|
| ``heat`` | ``[T, L, E]`` | tokens by logical expert; or, where slots were counted: |
| ``slot_heat`` | ``[T, L, R*S]`` | tokens by slot, as the destination ranks counted them |
| ``epoch`` | ``[T, L]`` | epoch of each layer's placement while ``slot_heat`` was counted |
| ``placement_layer``, ``placement_epoch`` | ``[K]`` | of the placements below |
| ``placement_phy2log`` | ``[K, R, S]`` | the expert in each slot |
| ``source_heat`` | ``[T, R, L, E]`` | tokens by source rank before dispatch; may be absent |
| ``step``, ``tokens``, ``phase`` | ``[T]`` | the model's step number, its tokens (-1 unknown), index into ``phases`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.zarr_array import ZarrArray, read_metadata, write_metadata
from eplb_service.io.trace import TraceFacts

SUFFIX = ".zarr"
FORMAT = "eplb-trace"
VERSION = 1
STEP_ARRAYS = ("step", "tokens", "phase", "heat", "slot_heat", "epoch", "source_heat")
"""Arrays with a row per step; the trace is as long as the shortest of those that it has."""
PLACEMENT_ARRAYS = ("placement_layer", "placement_epoch", "placement_phy2log")
"""Arrays with a row per placement."""


def write_head(folder: Path, facts: TraceFacts, experts: int) -> None:
    """Write the group's metadata, which makes the folder a trace; raises ``OutputError``."""
    attributes: dict[str, Any] = {"format": FORMAT, "version": VERSION, "experts": experts, **asdict(facts)}
    write_metadata(folder, {"zarr_format": 3, "node_type": "group", "attributes": attributes})


def read_head(folder: Path) -> tuple[TraceFacts, int]:
    """Facts and number of experts; raises ``HeatError`` where the folder is no trace of ours."""
    attributes = read_metadata(folder, "group").get("attributes", {})
    if not isinstance(attributes, Mapping) or attributes.get("format") != FORMAT:
        raise HeatError(f"is a Zarr group, but no heat trace: its attributes name no format {FORMAT!r}")
    if attributes.get("version") != VERSION:
        raise HeatError(
            f"is a trace of version {attributes.get('version')}; this eplb reads version {VERSION}"
        )
    try:
        return _facts(attributes), int(attributes["experts"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise HeatError(f"has attributes that cannot be read ({error!r})") from error


def _facts(attributes: Mapping[str, Any]) -> TraceFacts:
    known = {field.name: attributes[field.name] for field in fields(TraceFacts) if field.name in attributes}
    for name in ("ranks", "slots", "top_k", "bytes_per_expert"):
        known[name] = int(known.get(name, 0))
    for name in ("origin", "model", "batching"):
        known[name] = str(known.get(name, ""))
    known["layer_numbers"] = tuple(int(number) for number in known.get("layer_numbers", ()))
    known["nodes_R"] = tuple(int(node) for node in known.get("nodes_R", ()))
    known["phases"] = tuple(str(phase) for phase in known.get("phases", ("unknown",)))
    return TraceFacts(**known)


def open_arrays(folder: Path) -> dict[str, ZarrArray]:
    """All arrays of a trace that are there, by name; raises ``HeatError`` where they do not go together."""
    names = [name for name in (*STEP_ARRAYS, *PLACEMENT_ARRAYS) if (folder / name).is_dir()]
    arrays = {name: ZarrArray.open(folder / name) for name in names}
    if ("heat" in arrays) == ("slot_heat" in arrays):
        raise HeatError("holds neither heat nor slot_heat, or both; a trace has one of them")
    needed = {"step", "tokens", "phase"}
    if "slot_heat" in arrays:
        needed |= {"epoch", *PLACEMENT_ARRAYS}
    if missing := sorted(needed - set(arrays)):
        raise HeatError(f"lacks the array {missing[0]}; the trace was not copied whole")
    return arrays
