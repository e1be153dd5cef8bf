"""Recorded routes as heat by source rank: which rank each token really is on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

BATCH = 64
"""Requests that are decoded side by side, evenly spread over the ranks."""


def routed_sources(path: Path, ranks: int, batch: int = BATCH) -> np.ndarray:
    """Each step's choices by the rank of their token, int16 ``[T, R, L, E]``.

    ``path`` is an .npz with ``routes`` ``[tokens, L, choices]`` and ``req_ptr``, the bounds of requests. A request that
    ends gives its place to the next in file order, and place ``p`` is on rank ``p % ranks`` as long as the run lasts.
    Steps at the end with fewer than ``batch`` requests are left out.
    """
    with np.load(path) as file:
        routes_KLC, bounds = file["routes"], file["req_ptr"].astype(np.int64)
    step_K, place_K = steps_and_places(bounds, batch)
    steps = int(np.count_nonzero(np.bincount(step_K) == batch))
    kept_K = np.flatnonzero(step_K < steps)
    layers, experts = routes_KLC.shape[1], int(routes_KLC.max()) + 1
    source_TRLE = np.empty((steps, ranks, layers, experts), dtype=np.int16)
    row_K1 = (step_K[kept_K] * ranks + place_K[kept_K] % ranks)[:, None]
    for layer in range(layers):
        cells = row_K1 * experts + routes_KLC[kept_K, layer]
        counts = np.bincount(cells.ravel(), minlength=steps * ranks * experts)
        source_TRLE[:, :, layer] = counts.reshape(steps, ranks, experts)
    return source_TRLE


def steps_and_places(bounds: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The step of each token, and which of the ``batch`` places its request is in; both int64 ``[tokens]``."""
    step_K = np.empty(bounds[-1], dtype=np.int64)
    place_K = np.empty(bounds[-1], dtype=np.int64)
    free_from = np.zeros(batch, dtype=np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        place = int(np.argmin(free_from))
        begin = int(free_from[place])
        step_K[first:last] = np.arange(begin, begin + last - first)
        place_K[first:last] = place
        free_from[place] = begin + last - first
    return step_K, place_K
