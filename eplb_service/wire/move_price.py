"""What a service reports of the price of moves, and of where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.wire.fields import LONGEST_MESSAGE, WireError, check_ratio, printable
from eplb_service.wire.generated import operator_pb2

MOVE_PRICES = ("measured", "partly measured", "stated", "assumed")
"""Where it comes from, best first."""
_OPTIONAL = ("ms_per_move", "ms_per_megabyte", "ms_per_switch")


@dataclass(frozen=True)
class PricedMoves:
    """What the last decision's moves were priced at.

    Parameters
    ----------
    price
        Part of its peak-to-average ratio that a layer must win to have every slot moved.
    kind, reason
        One of ``MOVE_PRICES``, and what it was computed from, for people.
    ms_per_move, ms_per_megabyte, ms_per_switch
        Milliseconds of steps that are lost for each expert that a rank receives, the same for each megabyte of weights,
        and for which the model waits for a layer's switch; ``None`` where that is not known.
    """

    price: float
    kind: str
    reason: str
    ms_per_move: float | None = None
    ms_per_megabyte: float | None = None
    ms_per_switch: float | None = None


def encode_move_price(priced: PricedMoves) -> operator_pb2.MovePrice:
    """The message."""
    known = {name: value for name in _OPTIONAL if (value := getattr(priced, name)) is not None}
    return operator_pb2.MovePrice(
        price=priced.price, kind=priced.kind, reason=printable(priced.reason, LONGEST_MESSAGE), **known
    )


def decode_move_price(message: operator_pb2.MovePrice) -> PricedMoves:
    """The price; raises ``WireError`` naming the field that cannot be what it is."""
    costs = {
        name: check_ratio(getattr(message, name), f"move_price.{name}")
        for name in _OPTIONAL
        if message.HasField(name)
    }
    price = check_ratio(message.price, "move_price.price")
    if message.kind not in MOVE_PRICES:
        raise WireError(f"move_price.kind is {printable(message.kind)!r}, none that is known")
    return PricedMoves(price, message.kind, printable(message.reason, LONGEST_MESSAGE), **costs)
