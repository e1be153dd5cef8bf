"""What a service reports of the price of moves, and of where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.wire.fields import LONGEST_MESSAGE, WireError, check_ratio, printable
from eplb_service.wire.generated import operator_pb2

MOVE_PRICES = ("measured", "partly measured", "stated", "assumed")
"""Where it comes from, best first."""


@dataclass(frozen=True)
class PricedMoves:
    """What the last decision's moves were priced at.

    Parameters
    ----------
    price
        Part of its peak-to-average ratio that a layer must win to have every slot moved.
    kind, reason
        One of ``MOVE_PRICES``, and what it was computed from, for people.
    """

    price: float
    kind: str
    reason: str


def encode_move_price(priced: PricedMoves) -> operator_pb2.MovePrice:
    """The message."""
    return operator_pb2.MovePrice(
        price=priced.price, kind=priced.kind, reason=printable(priced.reason, LONGEST_MESSAGE)
    )


def decode_move_price(message: operator_pb2.MovePrice) -> PricedMoves:
    """The price; raises ``WireError`` naming the field that cannot be what it is."""
    if message.kind not in MOVE_PRICES:
        raise WireError(f"move_price.kind is {printable(message.kind)!r}, none that is known")
    return PricedMoves(
        price=check_ratio(message.price, "move_price.price"),
        kind=message.kind,
        reason=printable(message.reason, LONGEST_MESSAGE),
    )
