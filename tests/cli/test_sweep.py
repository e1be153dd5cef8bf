"""Tests of ``eplb sweep``: every trace is run with every setting, and errors are reported before the first run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.cli import main
from eplb_service.cli import sweep as command
from tests.cli.published import checked_document

TUESDAY = "[red]tuesday.npz"
GRID = ("--redundant", "4,8", "--window", "32", "--interval", "16,32", "--policy", "flashlb")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for number, name in enumerate(("monday", "[red]tuesday")):
        rng = np.random.default_rng(number)
        np.savez(f"{name}.npz", heat=rng.poisson(rng.lognormal(2, 1, (1, 2, 16)), (80, 2, 16)))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["sweep", *arguments, "--ranks", "4", "--workers", "1"])
    return code, *capsys.readouterr()


def test_the_output_is_one_table_that_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "monday.npz", TUESDAY, *GRID, "--set", "par-threshold=1.02,1.5")
    assert code == 0
    tables = printed.partition("\nPAR: ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in printed
    assert printed.startswith("2 traces, 8 choices\n")
    assert printed.count("flashlb, 5 slots,") == 2 * 4 + 4
    assert "mean over traces" in printed
    assert TUESDAY in printed


def test_json_and_file_have_the_published_keys(capsys: pytest.CaptureFixture[str]) -> None:
    varied = ("--set", "move_price=auto,0.5", "--set", "seed=1,2", "--out", "found.json")
    code, printed, _ = run(capsys, "monday.npz", TUESDAY, *GRID, *varied, "--json", "--step-ms", "30")
    assert code == 0
    document = checked_document("sweep", printed)
    assert checked_document("sweep", Path("found.json").read_text()) == document
    assert not document["interrupted"]
    rows = document["rows"]
    assert len(rows) == 2 * 4 * 2 * 2
    assert [row["trace"] for row in rows] == ["monday.npz"] * 16 + [TUESDAY] * 16
    chosen = [tuple(row["settings"].values()) for row in rows[:16:4]]
    assert chosen == [("auto", 1), ("auto", 2), (0.5, 1), (0.5, 2)]
    assert {(row["slots"], row["interval"]) for row in rows} == {(5, 16), (5, 32), (6, 16), (6, 32)}
    # Results are only comparable over the same steps.
    assert {row["start"] for row in rows} == {32}


def test_ctrl_c_shows_the_finished_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = command._rows
    seen: list[Any] = []

    def stopped(cell: Any, result: Any) -> list[Any]:
        if seen:
            raise KeyboardInterrupt
        seen.append(cell)
        return kept(cell, result)

    monkeypatch.setattr(command, "_rows", stopped)
    code, printed, _ = run(capsys, "monday.npz", TUESDAY, *GRID, "--json")
    assert code == 130
    document = checked_document("sweep", printed)
    assert document["interrupted"]
    assert len(document["rows"]) == 1
