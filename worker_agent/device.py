"""Abstraction over CPUs and accelerators: events, side streams, pinned memory and memory formats.

CUDA and ``torch_npu`` are available as torch device modules. On a CPU, work is complete when a call returns, so the
events and streams in this module do nothing.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Mark:
    """Point in the work queued on a device's current stream. Once passed, it can be reused with ``move``.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type == "cpu" else torch.get_device_module(device).Event()
        self._device = device
        self.move()

    def move(self) -> None:
        """Move the mark to the end of all work queued on the device's current stream."""
        if self._event is not None:
            # The thread's current device may be a different one.
            self._event.record(torch.get_device_module(self._device).current_stream(self._device))

    def passed(self) -> bool:
        """Return True if the device has reached the mark. This never waits."""
        return self._event is None or bool(self._event.query())

    def hold_current_stream(self) -> None:
        """Make work that is subsequently queued on the device's current stream wait for this mark."""
        if self._event is not None:
            self._event.wait(torch.get_device_module(self._device).current_stream(self._device))


class SideStream:
    """Device stream that is separate from the model's stream.

    Keep this object for as long as memory allocated on its stream is in use. The allocator reuses freed memory only on
    the stream on which it was allocated, so the model never receives memory that this stream still writes to.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context manager under which work is queued, and memory is allocated, on this stream."""
        if self._module is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context


def device_name(device: torch.device) -> str:
    """Return the device's model name, such as ``NVIDIA H100 80GB HBM3`` or ``Ascend910B3``.

    The name is empty for a CPU and for a device whose torch module does not provide one.
    """
    name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if name is None else str(name(device))


def empty_on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory that ``device`` can copy into without blocking its stream."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor in memory that ``device`` can copy from without blocking the caller."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def host_view(tensor: torch.Tensor) -> memoryview | None:
    """Return a view of a CPU tensor that is ten times faster to read than the tensor itself; ``None`` on a device."""
    return tensor.detach().reshape(-1).numpy().data if tensor.device.type == "cpu" else None


BASE_FORMATS = frozenset({0, 1, 2, 30})
"""torch_npu's numbers for NCHW, NHWC, ND and NCDHW. These formats store elements in order, so experts are slices."""
_ND = 2


def format_of(tensor: torch.Tensor) -> int:
    """Return torch_npu's number for a tensor's memory format, such as 29 for FRACTAL_NZ; 2 (ND) if not on an NPU."""
    if tensor.device.type != "npu":
        return _ND
    return int(importlib.import_module("torch_npu").get_npu_format(tensor))


def in_blocks(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's format is blocked (NZ). torch_npu can only send such a tensor with its padding."""
    return format_of(tensor) not in BASE_FORMATS


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself or, if its format is blocked (NZ), a copy on its device with the elements in order."""
    if not in_blocks(tensor):
        return tensor
    copy: torch.Tensor = importlib.import_module("torch_npu").npu_format_cast(tensor, _ND)
    return copy


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in order as a flat uint8 tensor: a view, or a copy if its format is blocked."""
    return in_order(tensor).detach().reshape(-1).view(torch.uint8)
