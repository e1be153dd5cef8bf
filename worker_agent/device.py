"""Differences between a CPU and an accelerator: events, side streams, pinned host memory and memory formats.

``torch_npu`` and CUDA register themselves as torch device modules. On a CPU, work is done when a call returns, so the
events and streams here do nothing.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Mark:
    """Point in the work of a device's current stream. It can ``move`` to a later point once it has passed.

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
        """Move the mark behind all work that is queued on the device's current stream."""
        if self._event is not None:
            # The thread's current device may be another one.
            self._event.record(torch.get_device_module(self._device).current_stream(self._device))

    def passed(self) -> bool:
        """Return True if the device has reached the mark. Never waits."""
        return self._event is None or bool(self._event.query())

    def hold_current_stream(self) -> None:
        """Make all work that is later queued on the device's current stream wait for this mark."""
        if self._event is not None:
            self._event.wait(torch.get_device_module(self._device).current_stream(self._device))


class SideStream:
    """Separate stream on a device, next to the model's.

    Keep it for as long as memory that was allocated on it is in use. The allocator reuses freed memory on the stream
    that it came from, so the model can never get it while work on this stream still writes to it.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on this stream and memory is allocated on it."""
        if self._module is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context


def device_name(device: torch.device) -> str:
    """Return the name of a device's model, such as ``NVIDIA H100 80GB HBM3`` or ``Ascend910B3``.

    The name is empty for a CPU, and for a device whose torch module does not provide names.
    """
    name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if name is None else str(name(device))


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory that ``device`` can copy into without blocking its stream."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor in memory that ``device`` can copy from without blocking the caller."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def host_view(tensor: torch.Tensor) -> memoryview | None:
    """Return a view of a CPU tensor's values, ten times faster to read than the tensor; ``None`` on a device."""
    return tensor.detach().reshape(-1).numpy().data if tensor.device.type == "cpu" else None


BASE_FORMATS = frozenset({0, 1, 2, 30})
"""torch_npu's numbers of NCHW, NHWC, ND and NCDHW. Their elements are in order, so each expert is a slice."""
_ND = 2


def format_of(tensor: torch.Tensor) -> int:
    """Return torch_npu's number of a tensor's memory format, such as 29 for FRACTAL_NZ. Without an NPU it is 2 (ND)."""
    if tensor.device.type != "npu":
        return _ND
    return int(importlib.import_module("torch_npu").get_npu_format(tensor))


def in_blocks(tensor: torch.Tensor) -> bool:
    """Return True if the memory is in blocks (NZ). torch_npu can send such memory only as a whole, with its padding."""
    return format_of(tensor) not in BASE_FORMATS


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy on its device with the elements in order if its memory is in blocks."""
    if not in_blocks(tensor):
        return tensor
    copy: torch.Tensor = importlib.import_module("torch_npu").npu_format_cast(tensor, _ND)
    return copy


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in order as flat uint8: a view, or a copy if its memory is in blocks."""
    return in_order(tensor).detach().reshape(-1).view(torch.uint8)
