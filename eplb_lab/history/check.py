"""Proves from the ranks' recorded histories that they always stood together: ``python -m eplb_lab.history.check``.

What is checked is what ARCHITECTURE.md promises: at any step all ranks serve one placement; a layer is committed by all
at the same step, by a vote in which all were ready, from what its own transfer has staged; heat is reported under the
placement that it was counted under.
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
"""Types of fields that are not whole numbers; ``before`` and ``after`` are an epoch and a digest."""
_NUMBER = TypeAdapter(StrictInt)


class HistoryError(ValueError):
    """Files that are no histories of one group; the message says which and why."""


@dataclass(frozen=True)
class _RankHistory:
    """One rank's lines, in order; ``last_step`` is the newest that it recorded anything of."""

    rank: int
    ranks: int
    lines: tuple[Line, ...]

    @property
    def last_step(self) -> int:
        """A rank that was killed may have made more, unrecorded."""
        return max((line["step"] for line in self.lines if "step" in line), default=0)

    def of(self, kind: str) -> list[Line]:
        """Its lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]


def read_histories(folder: Path) -> dict[str, list[_RankHistory]]:
    """All groups of ``folder``, each with its ranks in order; raises ``HistoryError`` where a rank is missing."""
    groups: dict[str, list[_RankHistory]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        text = path.read_text(encoding="utf-8", errors="replace")
        # A rank that was killed may have left half a line.
        whole = text[: text.rfind("\n") + 1]
        try:
            lines = tuple(_line(number, text) for number, text in enumerate(whole.splitlines()))
        except ValueError as error:
            raise HistoryError(f"{path} is not a rank's history: {error}") from error
        if not lines:
            raise HistoryError(f"{path} is empty")
        start = lines[0]
        history = _RankHistory(start["rank"], start["ranks"], lines)
        groups.setdefault(start["group"], []).append(history)
    if not groups:
        raise HistoryError(f"{folder} holds no history; set EPLB_AGENT_HISTORY to a folder to record one")
    for group, ranks in groups.items():
        ranks.sort(key=lambda history: history.rank)
        if [history.rank for history in ranks] != list(range(ranks[0].ranks)):
            raise HistoryError(f"group {group}: there are histories of ranks {[h.rank for h in ranks]} only")
    return groups


def _line(number: int, text: str) -> Line:
    line = json.loads(text)
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS or (kind == "start") != (number == 0):
        raise ValueError(f"line {number + 1} is not a record of this format")
    for field in _FIELDS[kind]:
        try:
            _TYPES.get(field, _NUMBER).validate_python(line.get(field))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ValueError(f"line {number + 1}: {field} is {line.get(field)!r}: {reason}") from error
    return dict(line)


def violations(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Yield a sentence for each promise that the histories of one group contradict."""
    yield from _different_starts(ranks)
    yield from _different_records(ranks)
    yield from _different_commits(ranks)
    for history in ranks:
        yield from _unfounded_commits(history, ranks)
        yield from _misplaced_heat(history)


def _different_starts(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    starts = {(h.lines[0]["epoch"], h.lines[0]["digest"]) for h in ranks}
    if len(starts) > 1:
        yield f"the ranks started from different placements: {sorted(starts)}"


def _different_records(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """Votes and transfers are the same for all ranks that recorded them."""
    seen: dict[str, tuple[int, str]] = {}
    for history in ranks:
        for line in history.lines:
            # Unheard and without a verdict, a vote says nothing of what the others heard.
            if line["kind"] == "vote" and (line["heard"] or line["decision"] == "COMMIT"):
                # A rank that missed a call counts late, which only a commit must not be.
                step = f" at step {line['step']}" if line["decision"] == "COMMIT" else ""
                name, found = f"vote {line['number']}", line["decision"] + step
            elif line["kind"] == "transfer":
                name, found = (
                    f"transfer {line['generation']}",
                    f"layers {line['layers']} in lane {line['lane']}",
                )
            else:
                continue
            first_rank, first = seen.setdefault(name, (history.rank, found))
            if found != first:
                yield f"{name}: rank {first_rank} recorded {first}, rank {history.rank} {found}"


def _different_commits(ranks: Sequence[_RankHistory]) -> Iterator[str]:
    """All commit the same layers at the same steps; a rank that had gone by then is excused."""
    longest = max(ranks, key=lambda history: len(history.of("commit")))
    expected = longest.of("commit")
    for history in ranks:
        commits = history.of("commit")
        for mine, theirs in zip(commits, expected, strict=False):
            if mine != theirs:
                yield f"rank {history.rank} committed {mine}, rank {longest.rank} {theirs}"
        missed = expected[len(commits) :]
        if missed and history.last_step > missed[0]["step"]:
            yield f"rank {history.rank} never committed {missed[0]}, as rank {longest.rank} did"


def _unfounded_commits(history: _RankHistory, ranks: Sequence[_RankHistory]) -> Iterator[str]:
    ballots = {(h.rank, vote["number"]): vote for h in ranks for vote in h.of("vote")}
    start = history.lines[0]
    served = [start["epoch"], start["digest"]]
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
            where = f"rank {history.rank}, layer {line['layer']} at step {line['step']}"
            if line["before"] != served or line["after"][0] != served[0] + 1:
                yield f"{where}: committed {line['before']} -> {line['after']} while serving {served}"
            served = line["after"]
            if vote is None or vote["decision"] != "COMMIT" or vote["step"] != line["step"]:
                yield f"{where}: committed without a vote for it"
            else:
                for rank in range(history.ranks):
                    other = ballots.get((rank, vote["number"]), vote)
                    if (other["progress"], other["abort"], other["plan"]) != ("READY", False, vote["plan"]):
                        yield f"{where}: committed though rank {rank} had voted {other}"
            if generation != line["generation"]:
                yield f"{where}: committed transfer {line['generation']} after transfer {generation} had begun"
            elif line["layer"] not in staged:
                yield f"{where}: committed a layer that transfer {generation} had not staged"
            else:
                staged.remove(line["layer"])


def _misplaced_heat(history: _RankHistory) -> Iterator[str]:
    """Commit lines at step ``s`` lie between the forward passes ``s - 1`` and ``s``, both counted from 0."""
    changes = [(0, history.lines[0]["layer_epochs"])]
    changes += [(commit["step"], commit["layer_epochs"]) for commit in history.of("commit")]
    reported_until = 0
    for heat in history.of("heat"):
        first, end = heat["first_step"], heat["first_step"] + heat["steps"]
        where = f"rank {history.rank}: heat of steps {first} to {end - 1}"
        if first < reported_until:
            yield f"{where} was reported after step {reported_until - 1} already"
        reported_until = end
        if any(first < step < end for step, _ in changes):
            yield f"{where} spans a switch"
        in_force = next(epochs for step, epochs in reversed(changes) if step <= first)
        if heat["layer_epochs"] != in_force:
            yield f"{where} is reported under {heat['layer_epochs']}, was counted under {in_force}"


def main() -> None:
    """Check a folder; exit code 1 where a promise was broken, 2 where there is nothing to check."""
    try:
        if len(sys.argv) != 2:
            raise HistoryError("usage: python -m eplb_lab.history.check FOLDER")
        groups = read_histories(Path(sys.argv[1]))
    except (HistoryError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    broken = [violation for ranks in groups.values() for violation in violations(ranks)]
    for ranks in groups.values():
        counts = {kind: len(ranks[0].of(kind)) for kind in ("vote", "transfer", "commit", "abort", "halt")}
        summary = ", ".join(f"{count} {kind}s" for kind, count in counts.items())
        print(f"{len(ranks)} ranks, {max(history.last_step for history in ranks)} steps, {summary}")
    for violation in broken:
        print(f"BROKEN {violation}")
    print("every promise was kept" if not broken else f"{len(broken)} promises were broken")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
