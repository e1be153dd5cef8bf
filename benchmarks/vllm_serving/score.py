"""What has come back so far from both servers, phase by phase, and the figures that a run ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.vllm_serving.comparison import Latency, Sameness, compare, latency
from benchmarks.vllm_serving.load import Answer, Request

ALONE, BALANCED = "alone", "balanced"
KINDS = (ALONE, BALANCED)
MOST_SPLIT_DRAWS = 0.02
"""Part of the requests of which float32 may decide a draw; it is far rarer than that."""


@dataclass
class Round:
    """Requests that both servers get one after the other, and their answers by kind of server, as they come."""

    requests: Sequence[Request]
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    complete: set[str] = field(default_factory=set)
    """Servers whose answers are all here, in order of the requests."""

    @property
    def phase(self) -> str:
        """What most of them ask about."""
        return self.requests[len(self.requests) // 2].phase

    def failed(self, kind: str) -> int:
        """Answers that failed."""
        return sum(answer.error is not None for answer in self.answers[kind])

    def latency(self, kind: str) -> Latency:
        """Of the answers so far."""
        return latency(list(self.answers[kind]))

    @property
    def sameness(self) -> Sameness | None:
        """Of both servers' answers, once all are here."""
        if len(self.complete) < len(KINDS):
            return None
        return compare(self.answers[ALONE], self.answers[BALANCED])


@dataclass(frozen=True)
class Switches:
    """What the service says of the balanced deployment at the end."""

    layers_switched: int
    experts_moved: int
    bytes_moved: int
    steps_lost: int


@dataclass(frozen=True)
class Balance:
    """Peak-to-average ratios, as the service measures them per step over its window.

    Parameters
    ----------
    before
        Of the last window before a layer switched; NaN where none was seen.
    after
        Mean over the windows since.
    steps
        How many were counted in all.
    """

    before: float
    after: float
    steps: int


def figures(rounds: Sequence[Round], switches: Switches, balance: Balance) -> dict[str, Any]:
    """Everything that ``--json`` writes."""
    everything = {kind: [answer for part in rounds for answer in part.answers[kind]] for kind in KINDS}
    pairs = [(part.latency(ALONE), part.latency(BALANCED)) for part in rounds]
    return {
        **asdict(compare(everything[ALONE], everything[BALANCED])),
        "failed": {kind: sum(part.failed(kind) for part in rounds) for kind in KINDS},
        "tokens": {kind: sum(len(answer.token_ids) for answer in everything[kind]) for kind in KINDS},
        **asdict(switches),
        "par": asdict(balance),
        "latency_ms": {kind: asdict(latency(everything[kind])) for kind in KINDS},
        "latency_ratio_by_round": {
            name: _spread(
                [getattr(with_agent, name) / getattr(without, name) for without, with_agent in pairs]
            )
            for name in ("first_p50", "token_p50")
        },
    }


def complaint(found: dict[str, Any]) -> str | None:
    """Why a run does not show what it should, or ``None``."""
    failed = sum(found["failed"].values())
    if failed:
        return f"{failed} requests failed"
    if found["different"]:
        return f"{found['different']} of {found['requests']} answers differ from vLLM's own"
    if found["split_draws"] > max(1, MOST_SPLIT_DRAWS * found["requests"]):
        return f"{found['split_draws']} of {found['requests']} answers part at a draw: more than rounding explains"
    if found["layers_switched"] == 0:
        return "no layer was switched; send more --requests"
    return None


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(ratios, [0.0, 0.5, 1.0])
    return {"min": float(low), "median": float(middle), "max": float(high)}
