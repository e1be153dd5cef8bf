"""Compute heat from each token's experts, batched into steps by a documented rule, or from tokens by physical slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import HeatError
from eplb_service.io.containers import Array, check_fits_memory
from eplb_service.io.trace import ArrayTrace, Int64, TraceFacts

DEFAULT_BATCH = 64
"""Default number of requests that are decoded concurrently."""


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
    """Return the heat of decoding ``batch`` requests concurrently.

    Each of the ``batch`` positions contributes one token per step. When its request ends, it continues with the next
    request in file order. The final steps, in which some positions are empty, are dropped.

    Parameters
    ----------
    routes_KLC
        Experts that each token chose, integers ``[tokens, L, choices]`` below ``experts``. Each request's tokens are in
        order.
    request_bounds
        Index of each request's first token, and the end of the last request, ``[requests + 1]``. Without it, every
        ``batch`` consecutive tokens form a step.
    experts
        Number of experts E. By default, it is the largest chosen expert plus one, and the trace's origin says so.
    batch
        Number of concurrent requests, by default ``DEFAULT_BATCH``.
    origin
        Format that the routes were read from.
    layer_numbers
        The model's own layer numbers.
    padded
        True if -1 means "no choice". Otherwise -1 is rejected.

    Raises
    ------
    HeatError
        If the routes or the bounds are inconsistent.

    Examples
    --------
    Requests of three, one and two tokens are decoded two at a time. The third takes over the second's position:

    >>> routes_KLC = np.array([[[0]], [[0]], [[0]], [[1]], [[2]], [[2]]])
    >>> trace = trace_of_routes(routes_KLC, [0, 3, 4, 6], experts=3, batch=2, origin="example")
    >>> trace.heat_TLE[:, 0]
    array([[1, 1, 0],
           [1, 0, 1],
           [1, 0, 1]], dtype=int32)
    """
    if routes_KLC.ndim != 3 or 0 in routes_KLC.shape or routes_KLC.dtype.kind not in "iu":
        raise HeatError(
            f"holds routes as {routes_KLC.dtype} of shape {list(routes_KLC.shape)}; "
            "expected integers of shape [tokens, layers, choices]"
        )
    batch = DEFAULT_BATCH if batch is None else batch
    smallest = int(routes_KLC.min())
    largest = int(routes_KLC.max())
    if experts is None:
        experts = largest + 1
        origin += f", {experts} experts, inferred from the highest expert id"
    if batch < 1:
        raise HeatError(f"cannot be batched into steps of {batch} tokens; use a --batch of at least 1")
    if smallest < (-1 if padded else 0) or largest >= experts:
        raise HeatError(
            f"routes refer to experts {smallest} to {largest}, but there are only {experts} experts"
        )
    tokens, layers, top_k = routes_KLC.shape
    bounds = _checked_bounds(request_bounds, tokens, batch)
    step_K, _ = steps_and_places(bounds, batch)
    tokens_T = np.bincount(step_K)
    steps = int(np.count_nonzero(tokens_T == batch))
    if steps == 0:
        raise HeatError(f"holds {tokens} tokens, too few for one step of {batch}; use a smaller --batch")
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
    """Describe the batching rule for users of the trace."""
    if requests == 1:
        routes = f"one request: {batch} consecutive tokens per step"
    else:
        routes = f"{requests} requests: {batch} decoded concurrently, each followed by the next in file order"
    return f"routes of {routes}; the last steps, with fewer tokens, are left out"


def moe_layers(chosen_KLC: Array) -> list[int]:
    """Return the indices of the MoE layers in ``[tokens, L, choices]``; an empty list if every layer looks dense.

    Dense layers also have a row in the engines' buffers, but it is never written, so all its values are equal.
    """
    first_L = chosen_KLC[0, :, 0]
    same_L = (chosen_KLC == first_L[None, :, None]).all(axis=(0, 2))
    if chosen_KLC.shape[2] == 1:
        same_L &= first_L < 0
    moe: list[int] = np.flatnonzero(~same_L).tolist()
    return moe


def look_like_routes(array: Array) -> bool:
    """Return True if an unnamed array can only be routes ``[tokens, L, choices]``.

    The choices of each token are distinct small integers. With 64 rows or more, heat is unlikely to have this property.
    """
    if array.dtype.kind not in "iu" or not 2 <= array.shape[2] <= 32 or array.shape[0] * array.shape[1] < 64:
        return False
    head = np.sort(array[:1024], axis=2)
    return bool((head[..., 1:] != head[..., :-1]).all() and head.max() < 4096)


def _checked_bounds(request_bounds: npt.ArrayLike | None, tokens: int, batch: int) -> Int64:
    """Return the request bounds as int64 ``[requests + 1]``; without bounds, all tokens form one request."""
    bounds = np.asarray([0, tokens] if request_bounds is None else request_bounds)
    increasing = (
        bounds.ndim == 1
        and bounds.size > 1
        and bounds.dtype.kind in "iu"
        and np.all(bounds[1:] >= bounds[:-1])
    )
    if not increasing or bounds[0] != 0 or bounds[-1] != tokens:
        raise HeatError(
            f"has request bounds {bounds.tolist()[:8]}; expected increasing integers from 0 to {tokens}"
        )
    if request_bounds is not None and batch > bounds.size - 1:
        raise HeatError(
            f"holds {bounds.size - 1} requests, too few for a batch of {batch}; use a smaller --batch"
        )
    return bounds.astype(np.int64)


def steps_and_places(bounds: Int64, batch: int) -> tuple[Int64, Int64]:
    """Return the step and the batch position of each token, both int64 ``[tokens]``.

    When a request ends, its position continues with the next request in file order. A single request is split into
    steps of ``batch`` tokens.

    Parameters
    ----------
    bounds
        Index of each request's first token, and the end of the last request, ``[requests + 1]``.
    batch
        Number of concurrent requests.
    """
    tokens = int(bounds[-1])
    if bounds.size == 2:
        return np.divmod(np.arange(tokens, dtype=np.int64), batch)
    step_K = np.empty(tokens, dtype=np.int64)
    position_K = np.empty(tokens, dtype=np.int64)
    free_from = np.zeros(batch, dtype=np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        position = int(np.argmin(free_from))
        start = int(free_from[position])
        step_K[first:last] = np.arange(start, start + last - first)
        position_K[first:last] = position
        free_from[position] = start + last - first
    return step_K, position_K


def heat_of_slots(slot_heat_TLP: Array, phy2log: npt.ArrayLike, experts: int | None = None) -> Array:
    """Convert tokens by slot to heat by logical expert, and return it, ``[T, L, E]``.

    Parameters
    ----------
    slot_heat_TLP
        Tokens by slot, ``[T, L, P]``.
    phy2log
        Expert in each slot, ``[L, P]`` or ``[L, R, S]``, or ``[P]`` if it is the same in all layers.
    experts
        Number of experts E; by default, the largest expert in the map plus one.

    Raises
    ------
    HeatError
        If the map does not fit the heat.

    Examples
    --------
    Expert 0 has a replica in the last slot.

    >>> heat_of_slots(np.array([[[5, 3, 2]]]), [0, 1, 0])
    array([[[7, 3]]])
    """
    if slot_heat_TLP.ndim != 3 or 0 in slot_heat_TLP.shape or slot_heat_TLP.dtype.kind not in "iuf":
        raise HeatError(
            f"holds tokens by slot as {slot_heat_TLP.dtype} of shape {list(slot_heat_TLP.shape)}; "
            "expected numbers of shape [steps, layers, slots]"
        )
    steps, layers, slots = slot_heat_TLP.shape
    expert_map = np.asarray(phy2log)
    map_LP = expert_map.reshape(len(expert_map), -1) if expert_map.ndim == 3 else np.atleast_2d(expert_map)
    if map_LP.shape not in ((layers, slots), (1, slots)) or map_LP.dtype.kind not in "iu":
        raise HeatError(
            f"the map ({expert_map.dtype}, shape {list(expert_map.shape)}) does not match heat of {layers} layers x "
            f"{slots} slots; expected one expert number per slot"
        )
    smallest = int(map_LP.min())
    largest = int(map_LP.max())
    experts = largest + 1 if experts is None else experts
    if smallest < 0 or largest >= experts:
        raise HeatError(
            f"the map refers to experts {smallest} to {largest}, but there are only {experts} experts"
        )
    dtype = np.float64 if slot_heat_TLP.dtype.kind == "f" else np.int64
    check_fits_memory(8 * steps * layers * experts)
    heat_TLE = np.zeros((steps, layers, experts), dtype=dtype)
    for layer, phy2log_P in enumerate(np.broadcast_to(map_LP, (layers, slots))):
        by_expert_P = np.argsort(phy2log_P, kind="stable")
        placed_experts, first = np.unique(phy2log_P[by_expert_P], return_index=True)
        counts_TP = slot_heat_TLP[:, layer, by_expert_P].astype(dtype)
        heat_TLE[:, layer, placed_experts] = np.add.reduceat(counts_TP, first, axis=1)
    return heat_TLE
