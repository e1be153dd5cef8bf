"""Heat from other counts: experts of each token, put into steps by a stated rule, or tokens by physical slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import HeatError
from eplb_service.io.containers import Array, check_fits_memory
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts

DEFAULT_BATCH = 64
"""Requests that are decoded side by side where nothing else is asked for."""


def trace_of_routes(
    routes_KLC: Array,
    request_bounds: npt.ArrayLike | None,
    experts: int | None,
    batch: int | None,
    origin: str,
    *,
    layer_numbers: tuple[int, ...] = (),
    padded: bool = False,
) -> ArrayTrace:
    """The trace of decoding ``batch`` requests side by side.

    Parameters
    ----------
    routes_KLC
        Experts of each token, ``[tokens, L, choices]``, integers below ``experts``; a request's tokens in order.
    request_bounds
        First token of each request and the end of the last, ``[requests + 1]``; without it ``batch`` consecutive tokens
        make a step.
    experts
        E; by default by the largest that is chosen, which the trace's origin then says.
    batch
        The requests in flight, ``DEFAULT_BATCH`` unless stated: a place gives one token a step, and takes the next
        request when its own is done. Steps at the end in which fewer are left are dropped.
    origin, layer_numbers
        Facts of the trace.
    padded
        True where -1 stands for no choice; otherwise it is refused.

    Raises ``HeatError`` where routes or bounds contradict themselves.
    """
    if routes_KLC.ndim != 3 or 0 in routes_KLC.shape or routes_KLC.dtype.kind not in "iu":
        raise HeatError(
            f"routes are integers [tokens, layers, choices], got {routes_KLC.dtype} {list(routes_KLC.shape)}"
        )
    batch = DEFAULT_BATCH if batch is None else batch
    least, most = int(routes_KLC.min()), int(routes_KLC.max())
    if experts is None:
        experts = most + 1
        origin += f", {experts} experts by the largest that was chosen"
    if batch < 1 or least < (-1 if padded else 0) or most >= experts:
        raise HeatError(
            f"routes name the experts {least} to {most}, in steps of {batch}; there are {experts}"
        )
    tokens, layers, top_k = routes_KLC.shape
    bounds = _checked_bounds(request_bounds, tokens, batch)
    step_K, _ = steps_and_places(bounds, batch)
    tokens_T = np.bincount(step_K)
    steps = int(np.count_nonzero(tokens_T == batch))
    if steps == 0:
        raise HeatError(f"{tokens} tokens fill no step of {batch}; use a smaller --batch")
    kept_K = np.flatnonzero(step_K < steps)
    check_fits_memory(4 * steps * layers * experts)
    heat_TLE = np.zeros((steps, layers, experts), dtype=np.int32)
    for layer in range(layers):
        chosen_KC = routes_KLC[kept_K, layer].astype(np.int64)
        cells = (step_K[kept_K, None] * experts + chosen_KC)[chosen_KC >= 0]
        heat_TLE[:, layer] = np.bincount(cells, minlength=steps * experts).reshape(steps, experts)
    facts = TraceFacts(
        origin, top_k=top_k, batching=_rule(batch, bounds.size - 1), layer_numbers=layer_numbers
    )
    return ArrayTrace(heat_TLE, facts, tokens_T[:steps].astype(np.int64))


def _rule(batch: int, requests: int) -> str:
    """Return the rule as text, for whoever reads the trace later."""
    cut = (
        f"{requests} requests: {batch} decoded side by side, the next in file order in place of one that ends"
    )
    if requests == 1:
        cut = f"one request: {batch} consecutive tokens per step"
    return f"routes of {cut}; the last steps, with fewer tokens, are left out"


def moe_layers(chosen_KLC: Array) -> list[int]:
    """Return the indices of the MoE layers of ``[tokens, L, choices]``; none if every layer looks dense.

    Buffers have a row for dense layers too, which is never written, so that all its values are equal.
    """
    first_L = chosen_KLC[0, :, 0]
    same_L = (chosen_KLC == first_L[None, :, None]).all(axis=(0, 2))
    if chosen_KLC.shape[2] == 1:
        same_L &= first_L < 0
    moe: list[int] = np.flatnonzero(~same_L).tolist()
    return moe


def look_like_routes(array: Array) -> bool:
    """Return whether a bare ``[tokens, L, choices]`` can only be routes: small distinct integers in each last axis."""
    if array.dtype.kind not in "iu" or not 2 <= array.shape[2] <= 32 or array.shape[0] * array.shape[1] < 64:
        return False
    head = np.sort(array[:1024], axis=2)
    return bool((head[..., 1:] != head[..., :-1]).all() and head.max() < 4096)


def _checked_bounds(request_bounds: npt.ArrayLike | None, tokens: int, batch: int) -> Int64:
    bounds = np.asarray([0, tokens] if request_bounds is None else request_bounds)
    rising = (
        bounds.ndim == 1
        and bounds.size > 1
        and bounds.dtype.kind in "iu"
        and np.all(bounds[1:] >= bounds[:-1])
    )
    if not rising or bounds[0] != 0 or bounds[-1] != tokens:
        raise HeatError(f"request bounds are rising integers from 0 to {tokens}, got {bounds.tolist()[:8]}")
    if request_bounds is not None and batch > bounds.size - 1:
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
    if slot_heat_TLP.ndim != 3 or 0 in slot_heat_TLP.shape or slot_heat_TLP.dtype.kind not in "iuf":
        raise HeatError(
            f"heat by slot is numbers [steps, layers, slots], got {slot_heat_TLP.dtype} {list(slot_heat_TLP.shape)}"
        )
    steps, layers, slots = slot_heat_TLP.shape
    found = np.asarray(phy2log)
    map_LP = found.reshape(len(found), -1) if found.ndim == 3 else np.atleast_2d(found)
    if map_LP.shape not in ((layers, slots), (1, slots)) or map_LP.dtype.kind not in "iu":
        raise HeatError(
            f"a map of {found.dtype} {list(found.shape)} does not fit heat of {layers} layers x {slots} slots; "
            "expected the number of an expert for each"
        )
    least, most = int(map_LP.min()), int(map_LP.max())
    experts = most + 1 if experts is None else experts
    if least < 0 or most >= experts:
        raise HeatError(f"the map names the experts {least} to {most}; there are {experts}")
    kind = np.float64 if slot_heat_TLP.dtype.kind == "f" else np.int64
    check_fits_memory(8 * steps * layers * experts)
    heat_TLE = np.zeros((steps, layers, experts), dtype=kind)
    for layer, phy2log_P in enumerate(np.broadcast_to(map_LP, (layers, slots))):
        by_expert_P = np.argsort(phy2log_P, kind="stable")
        named, first = np.unique(phy2log_P[by_expert_P], return_index=True)
        counts_TP = slot_heat_TLP[:, layer, by_expert_P].astype(kind)
        heat_TLE[:, layer, named] = np.add.reduceat(counts_TP, first, axis=1)
    return heat_TLE
