"""Comparison of two servers' answers to the same requests: equality, latency, and a run's summary."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.vllm_serving.load import Answer, Request

ALONE = "alone"
BALANCED = "balanced"
KINDS = (ALONE, BALANCED)
DECIDING, KEEPING, RESTING, NOTHING = BESIDE = ("deciding", "keeping", "resting", "nothing")
"""Service behaviour: it decides and moves experts, decides but moves nothing, does not decide, or is absent."""
MOST_SPLIT_DRAWS = 0.02
"""Maximum fraction of requests in which float32 rounding may change a draw; the actual fraction is far smaller."""
_DRAWS = 2000
MOST_ROUNDING = 1e-3
"""Largest difference between two log-probabilities that float32 rounding can cause.

A wrong expert changes them by 0.1 or more.
"""


@dataclass
class Round:
    """Requests sent to both servers alternately, and their answers, keyed by kind of server."""

    requests: Sequence[Request]
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """Phase of the request in the middle of the round, used as the phase of the whole round."""
        return self.requests[len(self.requests) // 2].phase

    def timed_pairs(self) -> list[tuple[Answer, Answer]]:
        """Return the pairs of answers in which both servers succeeded, the balanced server first."""
        pairs = zip(self.answers[BALANCED], self.answers[ALONE], strict=True)
        return [
            pair for pair in pairs if all(answer.error is None and len(answer.times) > 1 for answer in pair)
        ]

    def line(self) -> str:
        """Return the round's result as one line of text."""
        same = compare(self.answers[ALONE], self.answers[BALANCED])
        times = (f"{kind} {latency(self.answers[kind])['token_p50']:.1f} ms per token" for kind in KINDS)
        return f"{self.phase}: {same['identical']}/{same['requests']} identical; {'; '.join(times)}"


def compare(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Any]:
    """Compare two servers' answers to the same requests.

    Returns
    -------
    dict
        The number of ``requests``, and how many answers are ``identical``, ``split_draws`` and ``different``. In a
        split draw both servers give the candidates the same log-probabilities within ``MOST_ROUNDING``, but rounding
        changed the draw. Failed requests count as different. ``worst_difference`` is the largest difference between two
        log-probabilities.
    """
    gaps = [_largest_gap(*pair) for pair in zip(first, second, strict=True)]
    counts = {"requests": len(first), "identical": 0, "split_draws": 0, "different": 0}
    for answer, counterpart, gap in zip(first, second, gaps, strict=True):
        if answer.error or counterpart.error or gap > MOST_ROUNDING:
            counts["different"] += 1
        elif answer.token_ids == counterpart.token_ids:
            counts["identical"] += 1
        else:
            counts["split_draws"] += 1
    return counts | {"worst_difference": max(gaps, default=0.0)}


def _largest_gap(first: Answer, second: Answer) -> float:
    """Return the largest difference between two log-probabilities, up to and including the first token that differs."""
    largest = 0.0
    for index, (first_logs, second_logs) in enumerate(zip(first.candidates, second.candidates, strict=False)):
        shared = first_logs.keys() & second_logs.keys()
        # Rounding may exchange a few candidates with almost equal probabilities, but at least half must be the same.
        if len(shared) < len(first_logs) // 2:
            return float("inf")
        largest = max(largest, *(abs(first_logs[token] - second_logs[token]) for token in shared))
        if first.token_ids[index] != second.token_ids[index]:
            break
    return largest


def latency(answers: Iterable[Answer]) -> dict[str, float]:
    """Return the median and 99th-percentile latency in milliseconds, to the first token and per token.

    The figures are NaN if there are no answers.
    """
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
    """Return the ratios of the balanced server's median latencies to those of the unbalanced server.

    ``low`` and ``high`` are the bounds of the 95 % confidence interval from a bootstrap over rounds. Rounds are
    resampled instead of requests, because all requests in a round run under the same load on the machine.
    """
    pairs_by_round = [pairs for turn in rounds if (pairs := turn.timed_pairs())]
    if not pairs_by_round:
        return []
    drawn = np.random.default_rng(0).integers(0, len(pairs_by_round), (_DRAWS, len(pairs_by_round)))
    seconds = {
        "time to first token": lambda answer: answer.times[0],
        "time per token": lambda answer: float(np.mean(np.diff(answer.times))),
    }
    rows = []
    for name, latency_of in seconds.items():
        by_round = [
            np.array([[latency_of(answer) for answer in pair] for pair in pairs]) for pairs in pairs_by_round
        ]
        low, high = np.quantile(
            [_ratio([by_round[index] for index in draw]) for draw in drawn], [0.025, 0.975]
        )
        interval = {"ratio": _ratio(by_round), "low": float(low), "high": float(high)}
        rows.append({"name": f"{name}, balanced / alone"} | interval)
    return rows


def _ratio(by_round: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return the ratio of the medians over all rounds, each float64 ``[P, 2]`` with a pair of latencies per row."""
    balanced, unbalanced = np.median(np.concatenate(by_round), axis=0)
    return float(balanced / unbalanced)


def figures(
    rounds: Sequence[Round], switched: dict[str, int | None], par: dict[str, float]
) -> dict[str, Any]:
    """Return the content of the ``--json`` file. ``switched`` and ``par`` come from the service."""
    answers = {kind: [answer for turn in rounds for answer in turn.answers[kind]] for kind in KINDS}
    return {
        **compare(answers[ALONE], answers[BALANCED]),
        "failed": {kind: sum(answer.error is not None for answer in answers[kind]) for kind in KINDS},
        "tokens": {kind: sum(len(answer.token_ids) for answer in answers[kind]) for kind in KINDS},
        **switched,
        "par": par,
        "latency_ms": {kind: latency(answers[kind]) for kind in KINDS},
        "latency_ratios": ratios(rounds),
    }


def complaint(found: dict[str, Any], beside: str = DECIDING) -> str | None:
    """Return the reason why a run fails, or ``None``. ``beside`` is one of ``BESIDE``."""
    if failed := sum(found["failed"].values()):
        return f"{failed} requests failed"
    if found["different"]:
        return f"{found['different']} of {found['requests']} answers differ from those of the unbalanced vLLM"
    if found["split_draws"] > max(1, MOST_SPLIT_DRAWS * found["requests"]):
        return (
            f"{found['split_draws']} of {found['requests']} answers differ after a draw, which is more than rounding "
            "explains"
        )
    if beside == DECIDING and found["layers_switched"] == 0:
        return "no layer was switched; send more --requests"
    return None


def _moves(found: dict[str, Any]) -> dict[str, str]:
    """Return the rows on moves. In policy mode, vLLM moves the experts and does not count bytes."""
    if found["bytes_moved"] is None:
        return {
            "rearrangements with moves": f"{found['layers_switched']}, while serving",
            "moved": f"{found['experts_moved']} experts",
        }
    return {
        "layers switched": f"{found['layers_switched']} times, while serving",
        "moved": f"{found['experts_moved']} experts, {found['bytes_moved'] / 1e6:.1f} MB",
    }


def summary(found: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    same = f"{found['identical']} of {found['requests']} requests, {found['tokens'][BALANCED]} tokens"
    if found["split_draws"]:
        same += f"; {found['split_draws']} more differ only after a draw that float32 rounding changed"
    rows = {
        "identical text": same,
        "largest log-probability difference": f"{found['worst_difference']:.2g}",
        "failed requests": f"{found['failed'][BALANCED]} balanced, {found['failed'][ALONE]} unbalanced",
        **_moves(found),
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
