"""A kind of message, and the values that fields of several kinds are drawn from or must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st

from eplb_service.placement import Placement
from eplb_service.wire.codec import pack
from eplb_service.wire.fields import LAST_DIGEST, LAST_STEP, LAST_VERSION, LONGEST_TEXT, MOST_BYTES
from eplb_service.wire.generated import tensor_pb2
from eplb_service.wire.hello import (
    Shape,
)

SHAPE = Shape(ranks=2, layers=3, experts=4, slots=3, bytes_per_expert=64)

ACCEPTED: tuple[Any, ...] = ()
"""Marks a field that takes whatever its type can hold."""

VERSIONS = st.integers(0, LAST_VERSION - 1)
DIGESTS = st.integers(0, LAST_DIGEST - 1)
STEPS = st.integers(0, LAST_STEP - 1)
STATED_BYTES = st.none() | st.integers(0, MOST_BYTES - 1)
SECONDS = st.floats(0, 1e6)
RATIOS = st.floats(0, 1e300)
MEASURED = RATIOS | st.just(float("nan"))
TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=40)
CONTROL = "rank\x1b[2J"
LONG = "x" * (LONGEST_TEXT + 1)


@dataclass(frozen=True)
class Kind:
    """One message.

    Parameters
    ----------
    values
        Draws values that are sent.
    encode, decode
        Both directions.
    refused
        For each field, by its path in the message, values that must be refused; ``ACCEPTED`` where there is none.
    """

    values: st.SearchStrategy[Any]
    encode: Callable[[Any], Message]
    decode: Callable[[Any], Any]
    refused: dict[str, tuple[Any, ...]]


def placements() -> st.SearchStrategy[Placement]:
    """Placements of ``SHAPE``: the linear one with its experts renamed in each layer."""
    first = Placement.linear(SHAPE.layers, SHAPE.experts, SHAPE.ranks, SHAPE.slots)
    orders = st.lists(st.permutations(range(SHAPE.experts)), min_size=SHAPE.layers, max_size=SHAPE.layers)
    return orders.map(
        lambda names: Placement(
            np.stack([np.array(order)[row] for order, row in zip(names, first.phy2log_LRS, strict=True)]),
            SHAPE.experts,
        )
    )


def layer_epochs(most: int = LAST_VERSION - 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, most)] * SHAPE.layers)


def packed(*shape: int, value: int = 0) -> tensor_pb2.PackedArray:
    return pack(np.full(shape, value, dtype=np.int64))


WRONG_SHAPES = (packed(1), packed(2, 2), tensor_pb2.PackedArray(), tensor_pb2.PackedArray(dtype=99))
REFUSED_SHAPE = {
    "shape.layers": (0, 1 << 20, 2),
    "shape.experts": (0, 1 << 20, 7, 5),
    "shape.slots": (0, 1 << 20, 5, 2),
    "shape.bytes_per_expert": (MOST_BYTES, (1 << 64) - 1),
    "shape.dealing_width": (65, 1 << 20),
    "shape.rank_bound": ACCEPTED,
}
PAST_VERSIONS = (LAST_VERSION, (1 << 64) - 1)
PAST_DIGESTS = (LAST_DIGEST, (1 << 64) - 1)
PAST_BYTES = (MOST_BYTES, (1 << 64) - 1)
PAST_STEPS = (LAST_STEP, (1 << 62) - 100, (1 << 64) - 1)
PAST_TOTALS = (LAST_VERSION + 1, (1 << 64) - 1)
NOT_MEASURED = (float("inf"), -1.0, float("-inf"))
NO_SECONDS = (float("nan"), float("inf"), -1.0, 1e300)
