"""Two servers' answers to the same requests: whether they are the same, how long tokens took, and what a run shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.vllm_serving.load import Answer, Request

ALONE, BALANCED = "alone", "balanced"
KINDS = (ALONE, BALANCED)
DECIDING, KEEPING, RESTING, NOTHING = BESIDE = ("deciding", "keeping", "resting", "nothing")
"""The service beside the balanced server: decides and moves; decides, moves nothing; does not decide; is not there."""
MOST_SPLIT_DRAWS = 0.02
"""Part of the requests of which float32 may decide a draw; it is far rarer than that."""
_DRAWS = 2000
MOST_ROUNDING = 1e-3
"""Largest difference of two log-probabilities that float32 explains; a wrong expert changes them by tenths and more."""


@dataclass
class Round:
    """Requests that both servers get one after the other, and their answers by kind of server."""

    requests: Sequence[Request]
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """What most of them ask about."""
        return self.requests[len(self.requests) // 2].phase

    def timed_pairs(self) -> list[tuple[Answer, Answer]]:
        """Answers of both servers to each request that neither failed, balanced first."""
        pairs = zip(self.answers[BALANCED], self.answers[ALONE], strict=True)
        return [pair for pair in pairs if all(one.error is None and len(one.times) > 1 for one in pair)]

    def line(self) -> str:
        """The round in one line."""
        same = compare(self.answers[ALONE], self.answers[BALANCED])
        times = (f"{kind} {latency(self.answers[kind])['token_p50']:.1f} ms per token" for kind in KINDS)
        return f"{self.phase}: {same['identical']}/{same['requests']} identical; {'; '.join(times)}"


def compare(some: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """Compare answers to the same requests.

    Returns ``requests``; those answered ``identical`` to the last byte; ``split_draws``, which part where both servers
    give the candidates the same log-probabilities within ``MOST_ROUNDING``, so that float32 decided the draw; those
    that are otherwise ``different`` or failed; and the ``worst_difference`` of log-probabilities.
    """
    gaps = [_largest_gap(one, other) for one, other in zip(some, others, strict=True)]
    found = {"requests": len(some), "identical": 0, "split_draws": 0, "different": 0}
    for one, other, gap in zip(some, others, gaps, strict=True):
        if one.error or other.error or gap > MOST_ROUNDING:
            found["different"] += 1
        elif one.token_ids == other.token_ids:
            found["identical"] += 1
        else:
            found["split_draws"] += 1
    return found | {"worst_difference": max(gaps, default=0.0)}


def _largest_gap(one: Answer, other: Answer) -> float:
    """Largest difference of two log-probabilities, up to the token at which the answers part, that one included."""
    largest = 0.0
    for place, (here, there) in enumerate(zip(one.candidates, other.candidates, strict=False)):
        shared = here.keys() & there.keys()
        # Candidates of nearly the same probability may change places; most of them are the same all the same.
        if len(shared) < len(here) // 2:
            return float("inf")
        largest = max(largest, *(abs(here[token] - there[token]) for token in shared))
        if one.token_ids[place] != other.token_ids[place]:
            break
    return largest


def latency(answers: Iterable[Answer]) -> dict[str, float]:
    """Milliseconds to the first token and per token, median and 99th percentile; NaN without a good answer."""
    good = [answer.times for answer in answers if answer.error is None]
    seconds = {
        "first": [times[0] for times in good if times],
        "token": [later - earlier for times in good for earlier, later in itertools.pairwise(times)],
    }
    return {
        f"{name}_p{percent}": 1e3 * float(np.percentile(values, percent)) if values else float("nan")
        for name, values in seconds.items()
        for percent in (50, 99)
    }


def ratios(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Time to the first token and per token of the balanced server over the other's, from the medians of all requests.

    From ``low`` to ``high`` it is in 95 of 100 sets of rounds drawn again, with replacement: requests of one turn share
    its minute of the machine, whose two turns are beside each other and change places from round to round.
    """
    pairs_by_round = [pairs for part in rounds if (pairs := part.timed_pairs())]
    if not pairs_by_round:
        return []
    drawn = np.random.default_rng(0).integers(0, len(pairs_by_round), (_DRAWS, len(pairs_by_round)))
    seconds = {
        "time to first token": lambda answer: answer.times[0],
        "time per token": lambda answer: float(np.mean(np.diff(answer.times))),
    }
    found = []
    for name, of in seconds.items():
        by_round = [np.array([[of(one) for one in pair] for pair in pairs]) for pairs in pairs_by_round]
        low, high = np.quantile([_ratio([by_round[one] for one in draw]) for draw in drawn], [0.025, 0.975])
        ends = {"ratio": _ratio(by_round), "low": float(low), "high": float(high)}
        found.append({"name": f"{name}, balanced / alone"} | ends)
    return found


def _ratio(by_round: Sequence[npt.NDArray[np.float64]]) -> float:
    """Ratio of medians of pairs of seconds, float64 ``[P, 2]`` of each round."""
    some, others = np.median(np.concatenate(by_round), axis=0)
    return float(some / others)


def figures(rounds: Sequence[Round], switched: dict[str, int], par: dict[str, float]) -> dict[str, Any]:
    """Everything that ``--json`` writes: ``switched`` and ``par`` are the service's."""
    everything = {kind: [answer for part in rounds for answer in part.answers[kind]] for kind in KINDS}
    return {
        **compare(everything[ALONE], everything[BALANCED]),
        "failed": {kind: sum(answer.error is not None for answer in everything[kind]) for kind in KINDS},
        "tokens": {kind: sum(len(answer.token_ids) for answer in everything[kind]) for kind in KINDS},
        **switched,
        "par": par,
        "latency_ms": {kind: latency(everything[kind]) for kind in KINDS},
        "latency_ratios": ratios(rounds),
    }


def complaint(found: dict[str, Any], beside: str = DECIDING) -> str | None:
    """Why a run beside such a service does not show what it should, or ``None``."""
    if failed := sum(found["failed"].values()):
        return f"{failed} requests failed"
    if found["different"]:
        return f"{found['different']} of {found['requests']} answers differ from vLLM's own"
    if found["split_draws"] > max(1, MOST_SPLIT_DRAWS * found["requests"]):
        return f"{found['split_draws']} of {found['requests']} answers part at a draw: more than rounding explains"
    if beside == DECIDING and found["layers_switched"] == 0:
        return "no layer was switched; send more --requests"
    return None


def summary(found: dict[str, Any]) -> Table:
    """The figures as a table."""
    same = f"{found['identical']} of {found['requests']} requests, {found['tokens'][BALANCED]} tokens"
    if found["split_draws"]:
        same += f"; {found['split_draws']} more part at a draw that float32 decided"
    rows = {
        "identical text": same,
        "largest log-probability difference": f"{found['worst_difference']:.2g}",
        "failed requests": f"{found['failed'][BALANCED]} balanced, {found['failed'][ALONE]} left alone",
        "layers switched": f"{found['layers_switched']} times, while serving",
        "moved": f"{found['experts_moved']} experts, {found['bytes_moved'] / 1e6:.1f} MB",
        "PAR before the first switch": f"{found['par']['before']:.3f}",
        "PAR since": f"{found['par']['after']:.3f}, while domains drift",
    }
    for kind in KINDS:
        rows[f"ms, {kind}"] = ", ".join(f"{name} {ms:.1f}" for name, ms in found["latency_ms"][kind].items())
    for ratio in found["latency_ratios"]:
        rows[ratio["name"]] = f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    table = Table(title="Summary", show_header=False, title_justify="left", title_style="bold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
