"""Steps captured in CUDA graphs, and replayed on what has been written into their tensors in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(step: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """What replays the step, and the tensors that every replay writes; the step runs twice before, to warm up.

    The default capture mode forbids other threads what would only disturb their own work; communication libraries have
    such threads.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises ``RuntimeError`` where the host waits for the device."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # That it is a prototype, once in each process; the mode is set all the same.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
