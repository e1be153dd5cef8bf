"""Heat from other counts: experts of each token, put into steps by a stated rule, or tokens by physical slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError
from eplb_service.io.containers import Array
from eplb_service.io.trace import Int64
from eplb_service.placement import Int32

DEFAULT_BATCH = 64
"""Requests that are decoded side by side where nothing else is asked for."""

_SLAB_BYTES = 256 << 20


def rule(batch: int, requests: int) -> str:
    """Return the rule as text, for whoever reads the trace later."""
    if requests == 1:
        return f"routes without request bounds: {batch} consecutive tokens per step, an unfilled last step left out"
    return (
        f"routes of {requests} requests: {batch} decoded side by side, one token of each a step, "
        "the next request in file order taking the place of one that ends; "
        f"the last steps, with fewer than {batch} in flight, are left out"
    )


def heat_of_routes(
    routes_KLC: Array,
    request_bounds: npt.ArrayLike | None,
    experts: int,
    batch: int,
    *,
    padded: bool = False,
) -> tuple[Int32, Int64]:
    """Heat of decoding ``batch`` requests side by side, and the tokens of each step.

    Parameters
    ----------
    routes_KLC
        Experts of each token, ``[tokens, L, choices]``, integers below ``experts``; a request's tokens in order.
    request_bounds
        First token of each request and the end of the last, ``[requests + 1]``; without it ``batch`` consecutive tokens
        make a step.
    experts, batch
        E, and the requests in flight: a place gives one token a step, and takes the next request when its own is done.
        Steps at the end in which fewer are left are dropped.
    padded
        True where -1 stands for no choice; otherwise it is refused.

    Returns int32 ``[T, L, E]`` and int64 ``[T]``. Raises ``HeatError`` where routes or bounds contradict themselves.
    """
    if batch < 1:
        raise HeatError(f"a step has at least one token, got a batch of {batch}")
    _check_routes(routes_KLC, experts, -1 if padded else 0)
    tokens, layers, _ = routes_KLC.shape
    step_K, _ = steps_and_places(_checked_bounds(request_bounds, tokens, batch), batch)
    tokens_T = np.bincount(step_K)
    steps = int(np.count_nonzero(tokens_T == batch))
    if steps == 0:
        raise HeatError(f"{tokens} tokens fill no step of {batch}; use a smaller batch")
    kept_K = np.flatnonzero(step_K < steps)
    heat_TLE = np.zeros((steps, layers, experts), dtype=np.int32)
    for layer in range(layers):
        chosen_KC = routes_KLC[kept_K, layer].astype(np.int64)
        cell_KC = step_K[kept_K, None] * experts + chosen_KC
        cells = cell_KC[chosen_KC >= 0] if padded else cell_KC.ravel()
        heat_TLE[:, layer] = np.bincount(cells, minlength=steps * experts).reshape(steps, experts)
    return heat_TLE, tokens_T[:steps].astype(np.int64)


def look_like_routes(array: Array) -> bool:
    """Return whether a bare array can only be routes: small distinct integers in every row of its last axis."""
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape:
        return False
    tokens, layers, choices = array.shape
    if not 2 <= choices <= 32 or tokens * layers < 64:
        return False
    head = np.sort(array[:1024], axis=2)
    return bool((head[..., 1:] != head[..., :-1]).all() and head.max() < 4096)


def _check_routes(routes_KLC: Array, experts: int, least: int) -> None:
    if routes_KLC.ndim != 3 or 0 in routes_KLC.shape:
        raise HeatError(f"routes have the shape [tokens, layers, choices], got {list(routes_KLC.shape)}")
    if routes_KLC.dtype.kind not in "iu":
        raise HeatError(f"routes hold expert numbers, got {routes_KLC.dtype}")
    slab = max(1, _SLAB_BYTES // max(1, routes_KLC[0].nbytes))
    for first in range(0, len(routes_KLC), slab):
        part = routes_KLC[first : first + slab]
        bad = (part < least) | (part >= experts)
        if bad.any():
            token, layer, choice = np.argwhere(bad)[0]
            raise HeatError(
                f"routes name expert {part[token, layer, choice]} at token {first + token}, layer {layer}; "
                f"there are {experts}"
            )


def _checked_bounds(request_bounds: npt.ArrayLike | None, tokens: int, batch: int) -> Int64:
    if request_bounds is None:
        return np.array([0, tokens], dtype=np.int64)
    bounds = np.asarray(request_bounds)
    if bounds.ndim != 1 or bounds.size < 2 or bounds.dtype.kind not in "iu":
        raise HeatError(
            f"request bounds are integers [requests + 1], not {bounds.dtype} {list(bounds.shape)}"
        )
    if bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds.astype(np.int64)) < 0).any():
        raise HeatError(
            f"request bounds run from 0 to {tokens} and never fall, not {bounds[0]} to {bounds[-1]}"
        )
    if batch > bounds.size - 1:
        raise HeatError(f"a batch of {batch} needs as many requests; there are {bounds.size - 1}")
    return bounds.astype(np.int64)


def steps_and_places(bounds: Int64, batch: int) -> tuple[Int64, Int64]:
    """Step of each token, and which of ``batch`` places its request takes; both int64 ``[tokens]``.

    A request that ends gives its place to the next in file order. One request alone is cut into steps of ``batch``.
    """
    tokens = int(bounds[-1])
    if bounds.size == 2:
        return np.divmod(np.arange(tokens, dtype=np.int64), batch)
    step_K, place_K = np.empty((2, tokens), dtype=np.int64)
    free_from = np.zeros(batch, dtype=np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        place = int(np.argmin(free_from))
        start = int(free_from[place])
        step_K[first:last] = np.arange(start, start + last - first)
        place_K[first:last] = place
        free_from[place] = start + last - first
    return step_K, place_K


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
