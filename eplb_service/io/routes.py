"""From the experts that each token chose to heat: tokens are put into steps by a stated rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.trace import Int64
from eplb_service.placement import Int32

DEFAULT_BATCH = 64
"""Requests that are decoded side by side where nothing else is asked for."""

_SLAB_BYTES = 256 << 20


def rule(batch: int, requests: int) -> str:
    """The rule as text, for whoever reads the trace later."""
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
        First token of each request and the end of the last, ``[requests + 1]``; without it ``batch`` consecutive
        tokens make a step.
    experts
        E.
    batch
        Requests in flight: a place gives one token a step, and takes the next request when its own is done. Steps at
        the end in which fewer are left are dropped.
    padded
        Whether -1 stands for no choice; otherwise it is refused.

    Returns int32 ``[T, L, E]`` and int64 ``[T]``. Raises ``HeatError`` where routes or bounds contradict themselves.
    """
    if batch < 1:
        raise HeatError(f"a step has at least one token, got a batch of {batch}")
    _check_routes(routes_KLC, experts, -1 if padded else 0)
    tokens, layers, _ = routes_KLC.shape
    step_K = _steps(_checked_bounds(request_bounds, tokens, batch), batch, tokens)
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
    """Whether a bare array can only be routes: small distinct integers in every row of its last axis."""
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
            f"request bounds are integers [requests + 1], got {bounds.dtype} {list(bounds.shape)}"
        )
    if bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds.astype(np.int64)) < 0).any():
        raise HeatError(
            f"request bounds run from 0 to {tokens} and never fall; got {bounds[0]} to {bounds[-1]}"
        )
    if batch > bounds.size - 1:
        raise HeatError(f"a batch of {batch} needs as many requests; there are {bounds.size - 1}")
    return bounds.astype(np.int64)


def _steps(bounds: Int64, batch: int, tokens: int) -> Int64:
    """The step of each token, int64 ``[tokens]``."""
    if bounds.size == 2:
        return np.arange(tokens, dtype=np.int64) // batch
    step_K = np.empty(tokens, dtype=np.int64)
    free_from = np.zeros(batch, dtype=np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        place = int(np.argmin(free_from))
        start = int(free_from[place])
        step_K[first:last] = np.arange(start, start + last - first)
        free_from[place] = start + last - first
    return step_K
