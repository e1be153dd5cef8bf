"""What a service reports of what balancing is worth: one window's steps left alone, as served, under the best known."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.wire.fields import (
    LONGEST_MESSAGE,
    MOST_WINDOW_STEPS,
    WireError,
    check_count,
    check_finite,
    check_ratio,
    printable,
)
from eplb_service.wire.generated import operator_pb2

PRICES = ("measured", "fitted", "stated", "assumed")
"""Where what tokens cost in time comes from, best first."""
_OPTIONAL = ("step_ms", "gain_percent", "tokens_per_second", "tokens_per_second_won")


@dataclass(frozen=True)
class Worth:
    """The slowest ranks of all layers together, milliseconds per step, mean over ``steps`` steps.

    Parameters
    ----------
    left_alone_ms, serving_ms, best_ms
        Under the layout that was met first, as served now, and under what ``best`` names.
    gain_ms, gain_low_ms, gain_high_ms
        Left alone less served, and its 95 % interval.
    price_kind, price
        One of ``PRICES``, and the same for people.
    step_ms
        Wall time of a step as served, mean of ``timed_steps``; ``None`` where no agent reports it.
    gain_percent
        The gain as a part of a step as it would be, left alone; ``None`` where that is not known.
    tokens_per_second, tokens_per_second_won
        As served, and what the gain is of that; ``None`` where hosts do not report their tokens.
    """

    steps: int
    left_alone_ms: float
    serving_ms: float
    best_ms: float
    best: str
    gain_ms: float
    gain_low_ms: float
    gain_high_ms: float
    price_kind: str
    price: str
    timed_steps: int = 0
    step_ms: float | None = None
    gain_percent: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_won: float | None = None

    @property
    def verdict(self) -> str:
        """Whether balancing helps, as far as the interval says."""
        if self.gain_low_ms > 0:
            return "helps"
        return "costs" if self.gain_high_ms < 0 else "not shown to help"


def encode_worth(worth: Worth) -> operator_pb2.Worth:
    """The message."""
    fields = {
        **{name: value for name, value in vars(worth).items() if value is not None},
        "best": printable(worth.best, LONGEST_MESSAGE),
        "price": printable(worth.price, LONGEST_MESSAGE),
        "verdict": worth.verdict,
    }
    return operator_pb2.Worth(**fields)


def decode_worth(message: operator_pb2.Worth) -> Worth:
    """What it is worth; raises ``WireError`` naming the field that cannot be what it is."""
    known = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    worth = Worth(
        steps=check_count(message.steps, "worth.steps", MOST_WINDOW_STEPS + 1),
        left_alone_ms=check_ratio(message.left_alone_ms, "worth.left_alone_ms"),
        serving_ms=check_ratio(message.serving_ms, "worth.serving_ms"),
        best_ms=check_ratio(message.best_ms, "worth.best_ms"),
        best=printable(message.best, LONGEST_MESSAGE),
        gain_ms=check_finite(message.gain_ms, "worth.gain_ms"),
        gain_low_ms=check_finite(message.gain_low_ms, "worth.gain_low_ms"),
        gain_high_ms=check_finite(message.gain_high_ms, "worth.gain_high_ms"),
        price_kind=message.price_kind,
        price=printable(message.price, LONGEST_MESSAGE),
        timed_steps=check_count(message.timed_steps, "worth.timed_steps", MOST_WINDOW_STEPS + 1),
        **{name: check_finite(value, f"worth.{name}") for name, value in known.items()},
    )
    if message.price_kind not in PRICES:
        raise WireError(f"worth.price_kind is {printable(message.price_kind)!r}, none that is known")
    return worth
