"""Fingerprints of placements and tables, by which ranks find out whether they have the same installed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

# Digests fit a signed 64-bit integer, so that ranks can compare them by an integer all-reduce.
_DIGEST_MASK = (1 << 63) - 1


def layer_digest(layer: int, phy2log_RS: npt.NDArray[np.int32]) -> int:
    """63-bit fingerprint of one layer's slots."""
    return array_digest(np.ascontiguousarray(phy2log_RS, dtype="<i4"), salt=f"layer {layer}")


def combine_digests(experts: int, layer_digests: Iterable[int]) -> int:
    """Placement fingerprint from its layers' fingerprints, so that one switched layer costs one layer's hashing."""
    return array_digest(np.fromiter(layer_digests, dtype="<i8"), salt=f"placement of {experts}")


def array_digest(array: npt.NDArray[np.generic], salt: str = "") -> int:
    """63-bit fingerprint of an array's shape, type and bytes."""
    head = f"{salt} {array.dtype.str} {array.shape} ".encode()
    return (
        int.from_bytes(hashlib.blake2b(head + array.tobytes(), digest_size=8).digest(), "little")
        & _DIGEST_MASK
    )
