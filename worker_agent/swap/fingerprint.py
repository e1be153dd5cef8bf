"""Fingerprints of live experts. Ranks compare them before serving, to detect ranks that loaded different weights."""

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
"""Number of evenly spaced bytes to sample per tensor: enough to detect different weights within a few seconds."""


def expert_fingerprints(weights: Sequence[ExpertWeights]) -> npt.NDArray[np.uint32]:
    """Return the fingerprint of each local slot of a layer: the CRC-32 of a sample of its tensors.

    Parameters
    ----------
    weights
        The layer's weights by kind. Each is sampled on its device.

    Returns
    -------
    numpy.ndarray
        uint32 ``[S]``.
    """
    sums_S = [0] * len(weights[0])
    for weight in weights:
        stride = max(1, bytes_of(weight[0]).numel() // _SAMPLE_BYTES)
        # An even stride would always sample the same byte of a number, so make it odd.
        samples = torch.stack([bytes_of(expert)[:: stride | 1] for expert in weight]).cpu().numpy()
        sums_S = [zlib.crc32(sample.tobytes(), value) for sample, value in zip(samples, sums_S, strict=True)]
    return np.array(sums_S, dtype=np.uint32)


def differing_replicas(slots_LRS: Int32, sums_RLS: Sequence[npt.NDArray[np.uint32]]) -> str | None:
    """Return a message about the first expert whose replicas differ, or ``None`` if all replicas are equal.

    Parameters
    ----------
    slots_LRS
        Logical expert of each slot, int32 ``[L, R, S]``.
    sums_RLS
        Fingerprints of all slots, uint32 ``[L, S]`` per rank.

    Examples
    --------
    Ranks 0 and 1 each hold a replica of expert 1, with different fingerprints.

    >>> slots_LRS = np.array([[[0, 1], [1, 2]]], dtype=np.int32)
    >>> sums_RLS = [np.array([[70, 80]], dtype=np.uint32), np.array([[81, 90]], dtype=np.uint32)]
    >>> differing_replicas(slots_LRS, sums_RLS).partition(";")[0]
    'layer 0: ranks 0 and 1 hold different weights of expert 1'
    """
    for layer, slots_RS in enumerate(slots_LRS):
        first_replicas: dict[int, tuple[int, int]] = {}
        for (rank, slot), expert in np.ndenumerate(slots_RS):
            value = int(sums_RLS[rank][layer, slot])
            first_rank, first_value = first_replicas.setdefault(int(expert), (rank, value))
            if value != first_value:
                return (
                    f"layer {layer}: ranks {first_rank} and {rank} hold different weights of expert {expert}; check "
                    "that all ranks load the same checkpoint (dummy weights differ between slots) and pass their "
                    "layers in the same order"
                )
    return None


def shared_memory(layers: Mapping[str, Sequence[ExpertWeights]]) -> str | None:
    """Return a message about the first two layers whose experts share memory, or ``None`` if there are none.

    Parameters
    ----------
    layers
        Weights of each layer by kind, keyed by the layer's name.
    """
    owners: dict[int, str] = {}
    for name, weights in layers.items():
        for address in {expert.data_ptr() for weight in weights for expert in weight if expert.numel()}:
            owner = owners.setdefault(address, name)
            if owner != name:
                return (
                    f"{owner} and {name} share the memory of their experts, so their placements cannot differ"
                )
    return None
