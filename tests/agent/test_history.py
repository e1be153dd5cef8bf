"""The history checker accepts real ranks' histories and detects every altered record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eplb_lab.history.check import HistoryError, read_histories, violations
from tests.agent import live
from tests.ranks import run_ranks

RANKS = 3


def _record(folder: str) -> int:
    agent, layers, still = live.start(2, history=Path(folder), report_steps=4)
    for turn in range(2):
        targets = {layer: live.from_here(agent, 2 * turn + layer, layer) for layer in (0, 1)}
        offered = live.offering(agent, {2: targets}, pause=0.0)
        live.drive(agent, layers, still, 50, offered, epoch=2 * (turn + 1))
    agent.drain()
    agent.close()
    return agent.installed.epoch


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    assert run_ranks(RANKS, _record, str(folder)) == [4] * RANKS
    return folder


def _check(folder: Path) -> list[str]:
    return [broken for ranks in read_histories(folder).values() for broken in violations(ranks)]


def _changed(recorded: Path, folder: Path, kind: str, which: int, **facts: Any) -> list[str]:
    """Change one line of rank 1's history, or delete it if ``facts`` is empty, and return the violations found."""
    for path in recorded.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines[0]["rank"] == 1:
            line = [line for line in lines if line["kind"] == kind][which]
            line.update(facts)
            if not facts:
                lines.remove(line)
        (folder / path.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return _check(folder)


def test_an_unaltered_history_has_no_violations(recorded: Path) -> None:
    assert _check(recorded) == []
    (ranks,) = read_histories(recorded).values()
    assert [len(history.of("commit")) for history in ranks] == [4] * RANKS
    command = [sys.executable, "-m", "eplb_lab.history.check", str(recorded)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "all guarantees hold" in result.stdout


@pytest.mark.parametrize(
    ("kind", "which", "facts", "violation"),
    [
        ("commit", 1, {"step": 9_999}, "rank 1 committed"),
        ("commit", 1, {}, "rank 1 committed"),
        ("commit", -1, {}, "rank 1 never committed"),
        ("commit", 0, {"after": [1, 5]}, "rank 1 committed"),
        ("commit", 0, {"generation": 7}, "committed transfer 7 after transfer"),
        ("vote", 3, {"decision": "HALT"}, "vote 4"),
        ("transfer", 0, {"lane": 3}, "transfer 1: rank 0 recorded"),
        ("start", 0, {"digest": 3}, "started from different placements"),
        ("heat", 2, {"layer_epochs": [9, 9]}, "was reported under [9, 9]"),
        ("heat", 2, {"first_step": 0}, "was reported again: steps up to"),
        ("heat", -1, {"steps": 0, "first_step": 1}, "was reported again: steps up to"),
    ],
)
def test_one_altered_record_is_detected(kind, which, facts, violation, recorded, tmp_path) -> None:
    assert any(violation in broken for broken in _changed(recorded, tmp_path, kind, which, **facts))


def test_a_commit_that_one_rank_did_not_vote_for_is_detected(recorded: Path, tmp_path: Path) -> None:
    (ranks,) = read_histories(recorded).values()
    votes = ranks[1].of("vote")
    deciding = next(index for index, vote in enumerate(votes) if vote["decision"] == "COMMIT")
    broken = _changed(recorded, tmp_path, "vote", deciding, progress="TRANSFERRING")
    assert any("committed although rank 1 had voted" in violation for violation in broken)
    late = _changed(recorded, tmp_path, "vote", deciding, step=9_999)
    assert any(f"vote {votes[deciding]['number']}" in violation for violation in late)


def test_missing_and_incomplete_histories_are_rejected(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="contains no history"):
        read_histories(tmp_path)
    history = next(iter(recorded.glob("rank-0*.jsonl")))
    (tmp_path / history.name).write_bytes(history.read_bytes())
    with pytest.raises(HistoryError, match=r"only the histories of ranks \[0\] were found"):
        read_histories(tmp_path)
