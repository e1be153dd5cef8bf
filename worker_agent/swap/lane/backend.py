"""Which library carries a lane: chosen by the device that the experts are on, unless settings say otherwise."""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

TransferBackend: TypeAlias = Literal["auto", "gloo", "nccl", "hccl"]
"""What an operator may ask for."""


class Backend(str, enum.Enum):
    """A library of collectives."""

    GLOO = "gloo"
    """Host to host; experts on a device are copied through host memory."""
    NCCL = "nccl"
    """CUDA device to CUDA device."""
    HCCL = "hccl"
    """Ascend NPU to Ascend NPU."""


_OWN = {"cuda": Backend.NCCL, "npu": Backend.HCCL}


def choose_backend(asked: TransferBackend, device_type: str) -> Backend:
    """The backend for experts on such a device; raises ``ValueError`` where the one asked for cannot reach it."""
    if asked == "auto":
        return _OWN.get(device_type, Backend.GLOO)
    chosen = Backend(asked)
    if chosen not in (Backend.GLOO, _OWN.get(device_type)):
        reached = next(device for device, own in _OWN.items() if own is chosen)
        raise ValueError(
            f"transfer_backend {asked} moves experts between {reached} devices, these are on {device_type}; "
            "ask for auto, or for gloo, which goes through the host"
        )
    return chosen
