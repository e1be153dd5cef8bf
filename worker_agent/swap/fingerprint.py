"""Fingerprints of live experts, by which ranks find before they serve that they did not load the same weights."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.placement import Int32
from worker_agent.device import bytes_of
from worker_agent.live_layer import ExpertWeights

_SAMPLE_BYTES = 16_384
"""Bytes that are read of each tensor, evenly spread: other weights differ in them, and few seconds are spent."""


def expert_fingerprints(weights: Sequence[ExpertWeights]) -> npt.NDArray[np.uint32]:
    """CRC-32 of a sample of each local slot's tensors, uint32 ``[S]``; read from their device."""
    sums_S = [0] * len(weights[0])
    for weight in weights:
        stride = max(1, bytes_of(weight[0]).numel() // _SAMPLE_BYTES)
        # An even stride would read the same byte of every number.
        samples = torch.stack([bytes_of(expert)[:: stride | 1] for expert in weight]).cpu().numpy()
        sums_S = [zlib.crc32(sample.tobytes(), value) for sample, value in zip(samples, sums_S, strict=True)]
    return np.array(sums_S, dtype=np.uint32)


def differing_replicas(slots_LRS: Int32, sums_RLS: Sequence[npt.NDArray[np.uint32]]) -> str | None:
    """First expert of which two slots hold other weights, as a sentence; ``None`` where all replicas are alike."""
    for layer, slots_RS in enumerate(slots_LRS):
        first_of: dict[int, tuple[int, int]] = {}
        for (rank, slot), expert in np.ndenumerate(slots_RS):
            found = int(sums_RLS[rank][layer, slot])
            first, there = first_of.setdefault(int(expert), (rank, found))
            if found != there:
                return (
                    f"layer {layer}: ranks {first} and {rank} hold different weights of expert {expert}; one has "
                    "loaded other weights (dummy ones differ by slot), or hands its layers over in another order"
                )
    return None


def shared_memory(layers: Mapping[str, Sequence[ExpertWeights]]) -> str | None:
    """First two layers, by name, whose experts share memory, as a sentence; ``None`` where each has its own."""
    owner: dict[int, str] = {}
    for name, weights in layers.items():
        for address in {expert.data_ptr() for weight in weights for expert in weight if expert.numel()}:
            other = owner.setdefault(address, name)
            if other != name:
                return f"{other} and {name} share the memory of their experts: they cannot be placed apart"
    return None
