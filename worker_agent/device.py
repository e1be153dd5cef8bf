"""The few things that differ between a CPU and an accelerator: events, side streams, pinned host memory.

``torch_npu`` and CUDA register themselves as torch device modules; on a CPU work is done when a call returns, and
everything here is a no-op.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Mark:
    """A point in the current stream's work of a device."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type != "cpu":
            self._event = torch.get_device_module(device).Event()
            self._event.record()

    def passed(self) -> bool:
        """Whether the device has got there; never waits."""
        return self._event is None or bool(self._event.query())

    def hold_current_stream(self) -> None:
        """Make the work that is queued from here on, on the current stream, wait for this point."""
        if self._event is not None:
            self._event.wait()


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which work is queued beside the model's own stream."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    context: AbstractContextManager[Any] = module.stream(module.Stream())
    return context


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that ``device`` can copy into without holding up its stream."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")
