"""From tokens by physical slot, as engines count them, to heat by logical expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.trace import Int64


def heat_of_slots(slot_heat_TLP: Array, phy2log: npt.ArrayLike, experts: int | None = None) -> Array:
    """Heat by logical expert ``[T, L, E]`` from tokens by slot ``[T, L, P]``.

    ``phy2log`` is the expert in each slot: ``[L, P]``, ``[L, R, S]``, or ``[P]`` where all layers agree. ``experts`` is
    E where the map alone does not show it (the largest expert named, plus one). Raises ``HeatError`` where map and heat
    do not go together.
    """
    if slot_heat_TLP.ndim != 3 or 0 in slot_heat_TLP.shape:
        raise HeatError(f"heat by slot has the shape [steps, layers, slots], got {list(slot_heat_TLP.shape)}")
    if slot_heat_TLP.dtype.kind not in "iuf":
        raise HeatError(f"heat holds numbers, got {slot_heat_TLP.dtype}")
    steps, layers, slots = slot_heat_TLP.shape
    map_LP = _checked_map(np.asarray(phy2log), layers, slots)
    found = int(map_LP.max()) + 1
    if experts is not None and experts < found:
        raise HeatError(f"the map names expert {found - 1}; there are {experts}")
    kind = np.float64 if slot_heat_TLP.dtype.kind == "f" else np.int64
    heat_TLE = np.zeros((steps, layers, experts or found), dtype=kind)
    for layer, phy2log_P in enumerate(map_LP):
        by_expert_P = np.argsort(phy2log_P, kind="stable")
        first = np.flatnonzero(np.diff(phy2log_P[by_expert_P], prepend=-1))
        named = phy2log_P[by_expert_P][first]
        heat_TLE[:, layer, named] = np.add.reduceat(
            slot_heat_TLP[:, layer, by_expert_P].astype(kind), first, axis=1
        )
    return heat_TLE


def _checked_map(phy2log: Array, layers: int, slots: int) -> Int64:
    if phy2log.dtype.kind not in "iu":
        raise HeatError(f"a map holds expert numbers, got {phy2log.dtype}")
    flat = phy2log.reshape(phy2log.shape[0], -1) if phy2log.ndim == 3 else phy2log
    if flat.ndim == 1:
        flat = np.broadcast_to(flat, (layers, flat.size))
    if flat.shape != (layers, slots):
        raise HeatError(
            f"a map of shape {list(phy2log.shape)} does not fit heat of {layers} layers x {slots} slots; "
            "expected one expert for each"
        )
    if flat.min() < 0:
        layer, slot = np.argwhere(flat < 0)[0]
        raise HeatError(f"the map names expert {flat[layer, slot]} in layer {layer}, slot {slot}")
    return flat.astype(np.int64)
