"""Check recorded histories against the guarantees in ARCHITECTURE.md: ``python -m eplb_lab.history.check FOLDER``.

The guarantees are:

- At every step, all ranks use the same placement.
- All ranks commit a layer at the same step. Its experts were staged by the layer's own transfer, and every rank was
  ready in the vote that committed it.
- Heat is reported under the placement under which it was counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError

Line: TypeAlias = dict[str, Any]

_FIELDS = {
    "start": ("rank", "ranks", "group", "epoch", "digest", "layer_epochs"),
    "vote": ("step", "number", "heard", "progress", "plan", "abort", "decision"),
    "transfer": ("step", "generation", "lane", "layers"),
    "commit": ("step", "generation", "layer", "before", "after", "layer_epochs"),
    "abort": ("step",),
    "halt": ("step",),
    "heat": ("first_step", "steps", "layer_epochs"),
    "end": ("step",),
}
"""Fields of each kind of line."""
_TYPES: dict[str, TypeAdapter[Any]] = {
    **dict.fromkeys(("group", "progress", "decision"), TypeAdapter(StrictStr)),
    **dict.fromkeys(("heard", "abort"), TypeAdapter(StrictBool)),
    **dict.fromkeys(("before", "after"), TypeAdapter(tuple[StrictInt, StrictInt])),
    **dict.fromkeys(("layers", "layer_epochs"), TypeAdapter(list[StrictInt])),
}
"""Types of the fields that are not integers. ``before`` and ``after`` are an epoch and a digest."""
_NUMBER = TypeAdapter(StrictInt)


class HistoryError(ValueError):
    """Raised if a directory or file is not a group's complete history. The message gives its path and the reason."""


@dataclass(frozen=True)
class _RankHistory:
    """History of one rank.

    Parameters
    ----------
    rank
        The rank.
    ranks
        Number of ranks in its group.
    lines
        Lines in the order in which they were recorded.
    """

    rank: int
    ranks: int
    lines: tuple[Line, ...]

    @property
    def last_step(self) -> int:
        """Last recorded step. A rank that was killed may have run more steps without recording them."""
        return max((line["step"] for line in self.lines if "step" in line), default=0)

    def of(self, kind: str) -> list[Line]:
        """Return the lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]


def read_histories(folder: Path) -> dict[str, list[_RankHistory]]:
    """Read all histories in a directory.

    Parameters
    ----------
    folder
        Directory with the files ``rank-*.jsonl`` of one or more groups.

    Returns
    -------
    dict of str to list
        Histories of each group in rank order.

    Raises
    ------
    HistoryError
        If a file is not a history, if a rank of a group is missing, or if there are no files.
    """
    groups: dict[str, list[_RankHistory]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        text = path.read_text(encoding="utf-8", errors="replace")
        # A rank that was killed may have written an incomplete last line.
        complete = text[: text.rfind("\n") + 1]
        try:
            lines = tuple(_parse_line(number, line) for number, line in enumerate(complete.splitlines()))
        except ValueError as error:
            raise HistoryError(f"{path} is not a rank's history: {error}") from error
        if not lines:
            raise HistoryError(f"{path} is empty")
        start = lines[0]
        history = _RankHistory(start["rank"], start["ranks"], lines)
        groups.setdefault(start["group"], []).append(history)
    if not groups:
        raise HistoryError(f"{folder} contains no history; set EPLB_AGENT_HISTORY to a folder to record one")
    for group, histories in groups.items():
        histories.sort(key=lambda history: history.rank)
        ranks = [history.rank for history in histories]
        if ranks != list(range(histories[0].ranks)):
            raise HistoryError(
                f"group {group}: only the histories of ranks {ranks} were found; "
                f"collect the files of all {histories[0].ranks} ranks"
            )
    return groups


def _parse_line(number: int, text: str) -> Line:
    """Parse and validate one line. Raises ``ValueError`` if it is not a line of a history."""
    line = json.loads(text)
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS or (kind == "start") != (number == 0):
        raise ValueError(f"line {number + 1} is not a valid history record")
    for field in _FIELDS[kind]:
        try:
            _TYPES.get(field, _NUMBER).validate_python(line.get(field))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ValueError(f"line {number + 1}: {field} is {line.get(field)!r}: {reason}") from error
    return dict(line)


def violations(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Yield a message for each violated guarantee.

    Parameters
    ----------
    ranks
        Histories of all ranks of one group.

    Examples
    --------
    Two ranks commit layer 0 at step 4, but rank 1 gets a placement with a different digest, and neither rank has
    recorded a vote:

    >>> def history(rank, digest):
    ...     start = {"kind": "start", "epoch": 0, "digest": 7, "layer_epochs": [0]}
    ...     transfer = {"kind": "transfer", "generation": 1, "lane": 0, "layers": [0]}
    ...     commit = {"kind": "commit", "step": 4, "generation": 1, "layer": 0}
    ...     commit |= {"before": [0, 7], "after": [1, digest], "layer_epochs": [1]}
    ...     return _RankHistory(rank, 2, (start, transfer, commit))
    >>> for violation in violations([history(0, digest=8), history(1, digest=9)]):
    ...     print(violation[:46])
    rank 1 committed {'kind': 'commit', 'step': 4,
    rank 0, layer 0 at step 4: committed without a
    rank 1, layer 0 at step 4: committed without a
    """
    yield from _different_starts(ranks)
    yield from _different_records(ranks)
    yield from _different_commits(ranks)
    for history in ranks:
        yield from _unfounded_commits(history, ranks)
        yield from _misplaced_heat(history)


def _different_starts(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Check that all ranks started from the same placement."""
    starts = {(history.lines[0]["epoch"], history.lines[0]["digest"]) for history in ranks}
    if len(starts) > 1:
        yield f"the ranks started from different placements: {sorted(starts)}"


def _different_records(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Check that a vote or transfer is the same on all ranks that recorded it."""
    first_records: dict[str, tuple[int, str]] = {}
    for history in ranks:
        for line in history.lines:
            # If a rank missed the outcome of a vote that did not commit, its line does not contain the outcome.
            if line["kind"] == "vote" and (line["heard"] or line["decision"] == "COMMIT"):
                # If a rank's host missed a call, the rank counts the vote at a later step than its peers. Therefore,
                # compare steps only for commits.
                step = f" at step {line['step']}" if line["decision"] == "COMMIT" else ""
                name = f"vote {line['number']}"
                record = line["decision"] + step
            elif line["kind"] == "transfer":
                name = f"transfer {line['generation']}"
                record = f"layers {line['layers']} in lane {line['lane']}"
            else:
                continue
            first_rank, first = first_records.setdefault(name, (history.rank, record))
            if record != first:
                yield f"{name}: rank {first_rank} recorded {first}, but rank {history.rank} recorded {record}"


def _different_commits(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Check that all ranks committed the same layers at the same steps, except for ranks that had exited by then."""
    longest = max(ranks, key=lambda history: len(history.of("commit")))
    expected_commits = longest.of("commit")
    for history in ranks:
        commits = history.of("commit")
        for commit, expected in zip(commits, expected_commits, strict=False):
            if commit != expected:
                yield f"rank {history.rank} committed {commit}, but rank {longest.rank} committed {expected}"
        missed = expected_commits[len(commits) :]
        if missed and history.last_step > missed[0]["step"]:
            yield f"rank {history.rank} never committed {missed[0]}, although rank {longest.rank} did"


def _unfounded_commits(history: _RankHistory, ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Check that each commit follows from the current layout, a unanimous vote and the layer's own transfer."""
    ballots = {(peer.rank, vote["number"]): vote for peer in ranks for vote in peer.of("vote")}
    start = history.lines[0]
    current = [start["epoch"], start["digest"]]
    vote: Line | None = None
    generation: int | None = None
    staged: list[int] = []
    for line in history.lines:
        if line["kind"] == "vote":
            vote = line
        elif line["kind"] == "transfer":
            generation = line["generation"]
            staged = list(line["layers"])
        elif line["kind"] == "commit":
            label = f"rank {history.rank}, layer {line['layer']} at step {line['step']}"
            if line["before"] != current or line["after"][0] != current[0] + 1:
                yield f"{label}: committed {line['before']} -> {line['after']} while serving {current}"
            current = line["after"]
            if vote is None or vote["decision"] != "COMMIT" or vote["step"] != line["step"]:
                yield f"{label}: committed without a vote for it"
            else:
                for rank in range(history.ranks):
                    ballot = ballots.get((rank, vote["number"]), vote)
                    if (ballot["progress"], ballot["abort"], ballot["plan"]) != (
                        "READY",
                        False,
                        vote["plan"],
                    ):
                        yield f"{label}: committed although rank {rank} had voted {ballot}"
            if generation != line["generation"]:
                yield f"{label}: committed transfer {line['generation']} after transfer {generation} had begun"
            elif line["layer"] not in staged:
                yield f"{label}: committed a layer that transfer {generation} had not staged"
            else:
                staged.remove(line["layer"])


def _misplaced_heat(history: _RankHistory) -> Iterator[str]:
    """Check that each heat report carries the layer epochs of its steps, and that reports do not overlap.

    A commit at step ``s`` takes effect between the forward passes ``s - 1`` and ``s``, counted from 0.
    """
    changes = [(0, history.lines[0]["layer_epochs"])]
    changes += [(commit["step"], commit["layer_epochs"]) for commit in history.of("commit")]
    reported_until = 0
    for heat in history.of("heat"):
        first = heat["first_step"]
        end = first + heat["steps"]
        label = f"rank {history.rank}: heat of steps {first} to {end - 1}"
        if first < reported_until:
            yield f"{label} was reported again: steps up to {reported_until - 1} had already been reported"
        reported_until = end
        if any(first < step < end for step, _ in changes):
            yield f"{label} spans a commit"
        current_epochs = next(epochs for step, epochs in reversed(changes) if step <= first)
        if heat["layer_epochs"] != current_epochs:
            yield f"{label} was reported under {heat['layer_epochs']}, but counted under {current_epochs}"


def main() -> None:
    """Check the given directory. Exit with 1 if a guarantee is violated, or 2 if the directory is invalid."""
    try:
        if len(sys.argv) != 2:
            raise HistoryError("usage: python -m eplb_lab.history.check FOLDER")
        groups = read_histories(Path(sys.argv[1]))
    except (HistoryError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    broken_promises = [violation for ranks in groups.values() for violation in violations(ranks)]
    for ranks in groups.values():
        counts = {kind: len(ranks[0].of(kind)) for kind in ("vote", "transfer", "commit", "abort", "halt")}
        summary = ", ".join(f"{count} {kind}s" for kind, count in counts.items())
        print(f"{len(ranks)} ranks, {max(history.last_step for history in ranks)} steps, {summary}")
    for violation in broken_promises:
        print(f"violation: {violation}")
    print(
        "all guarantees hold" if not broken_promises else f"{len(broken_promises)} guarantees were violated"
    )
    sys.exit(1 if broken_promises else 0)


if __name__ == "__main__":
    main()
