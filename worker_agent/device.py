"""The few things that differ between a CPU and an accelerator: events, side streams, pinned host memory.

``torch_npu`` and CUDA register themselves as torch device modules; on a CPU work is done when a call returns, and
everything here is a no-op.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Mark:
    """A point in the current stream's work of a device; once it has passed it can ``move`` on."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type == "cpu" else torch.get_device_module(device).Event()
        self._device = device
        self.move()

    def move(self) -> None:
        """Be the point that the device's current stream has been given work up to."""
        if self._event is not None:
            # Named, not implied: a thread's current device need not be this one.
            self._event.record(torch.get_device_module(self._device).current_stream(self._device))

    def passed(self) -> bool:
        """Return whether the device has got there; never waits."""
        return self._event is None or bool(self._event.query())

    def hold_current_stream(self) -> None:
        """Make the work that is queued from here on, on the device's current stream, wait for this point."""
        if self._event is not None:
            self._event.wait(torch.get_device_module(self._device).current_stream(self._device))


class SideStream:
    """A stream of its own on ``device``, beside the model's.

    Kept for as long as what was allocated on it is used: memory that is given back goes to the next who asks on the
    same stream, so it can never go to the model while something here still writes to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def current(self) -> AbstractContextManager[Any]:
        """A context in which work is queued here, and memory taken."""
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
    """Host memory that ``device`` can copy into without holding up its stream."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host's ``tensor`` in memory that ``device`` can copy from without holding up the caller."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def host_view(tensor: torch.Tensor) -> memoryview | None:
    """The numbers in a CPU's tensor, one of which costs a tenth of an operation; ``None`` of a device's."""
    return tensor.detach().reshape(-1).numpy().data if tensor.device.type == "cpu" else None


BASE_FORMATS = frozenset({0, 1, 2, 30})
"""torch_npu's numbers of NCHW, NHWC, ND and NCDHW. Elements are in order, so each expert is a slice of its tensor."""
_ND = 2


def format_of(tensor: torch.Tensor) -> int:
    """Return torch_npu's number of a tensor's memory format, 29 for FRACTAL_NZ; 2 (ND) on devices other than NPUs."""
    if tensor.device.type != "npu":
        return _ND
    return int(importlib.import_module("torch_npu").get_npu_format(tensor))


def in_blocks(tensor: torch.Tensor) -> bool:
    """Return True if the memory is in blocks (NZ). torch_npu sends such memory only whole, including padding."""
    return format_of(tensor) not in BASE_FORMATS


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or, if its memory is in blocks, a copy on its device with the elements in order."""
    if not in_blocks(tensor):
        return tensor
    copy: torch.Tensor = importlib.import_module("torch_npu").npu_format_cast(tensor, _ND)
    return copy


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in order as flat uint8: a view, or a copy if its memory is in blocks."""
    return in_order(tensor).detach().reshape(-1).view(torch.uint8)
