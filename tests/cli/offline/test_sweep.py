"""``eplb sweep`` shows every trace under every setting, and says before it begins what cannot be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.cli import main
from eplb_service.cli.offline import sweep as command
from tests.cli.arguments import changed
from tests.cli.published import held

GRID = ("--redundant", "4,8", "--window", "32", "--interval", "16,32", "--policy", "flashlb")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for number, name in enumerate(("monday", "tuesday")):
        rng = np.random.default_rng(number)
        np.savez(f"{name}.npz", heat=rng.poisson(rng.lognormal(2, 1, (1, 2, 16)), (80, 2, 16)))
    np.savez("idle.npz", heat=np.zeros((80, 2, 16), dtype=np.int32))
    np.savez("short.npz", heat=np.ones((20, 2, 16), dtype=np.int32))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["sweep", *arguments, "--ranks", "4", "--workers", "1"])
    return code, *capsys.readouterr()


def test_one_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "monday.npz", "tuesday.npz", *GRID, "--set", "par-threshold=1.02,1.5")
    assert code == 0
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert printed.startswith("2 traces, 8 settings, 1 policy\n")
    assert printed.count("flashlb, 5 slots, interval 16,") == 2 * 2 + 2
    assert "mean over traces" in printed


def test_a_single_choice_of_one_trace_names_nothing_that_is_not_varied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, printed, _ = run(capsys, "monday.npz", "--interval", "16", "--policy", "none")
    assert code == 0
    assert printed.startswith("1 trace, 1 setting, 1 policy\n")
    assert " none " in printed
    assert "mean over traces" not in printed


def test_json_and_file_are_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    varied = ("--set", "move_price=auto,0.5", "--set", "swaps=on,off", "--out", "found.json")
    code, printed, _ = run(capsys, "monday.npz", "tuesday.npz", *GRID, *varied, "--json", "--step-ms", "30")
    assert code == 0
    document = held("sweep", printed)
    assert held("sweep", Path("found.json").read_text()) == document
    assert not document["interrupted"]
    rows = document["rows"]
    assert len(rows) == 2 * 4 * 2 * 2
    assert [row["trace"] for row in rows] == ["monday.npz"] * 16 + ["tuesday.npz"] * 16
    chosen = [tuple(row["settings"].values()) for row in rows[:16:4]]
    assert chosen == [("auto", True), ("auto", False), (0.5, True), (0.5, False)]
    assert {(row["slots"], row["interval_steps"]) for row in rows} == {(5, 16), (5, 32), (6, 16), (6, 32)}
    # Figures are compared over the same steps.
    assert {(row["first_step_scored"], row["steps_scored"]) for row in rows} == {(32, 48)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["monday.npz", "absent.npz"], "absent.npz"),
        (["monday.npz", "idle.npz"], "idle.npz: all of its 80 steps hold zero tokens"),
        (["monday.npz", "short.npz", "--interval", "32"], "short.npz: the trace has 20 steps"),
        (["monday.npz", "--redundant", "3"], "monday.npz: 16 experts and 3 redundant ones do not spread"),
        (
            ["monday.npz", "--set", "swaps"],
            "--set 'swaps': write NAME=VALUE,VALUE, each name once; names are",
        ),
        (["monday.npz", "--set", "swap=on"], "--set 'swap=on': write NAME=VALUE"),
        (["monday.npz", "--set", "swaps=on", "--set", "swaps=off"], "each name once"),
        (["monday.npz", "--set", "swaps=1"], "--set swaps: '1' is not on or off"),
        (["monday.npz", "--set", "par_threshold=low"], "--set par_threshold: 'low' is not a number"),
        (["monday.npz", "--set", "par_threshold=0.5"], "par_threshold"),
        (["monday.npz", "--policy", "greedy"], "--policy names 'greedy'"),
        (["monday.npz", "--out", "found.csv"], "must end in .json"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line_before_anything_is(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "compile_solver", lambda: pytest.fail("the work was begun"))
    before = sorted(Path().iterdir())
    code, printed, err = run(capsys, *changed(["--interval", "16"], *arguments))
    assert (code, printed) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(Path().iterdir()) == before


def test_ctrl_c_shows_what_has_been_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = command.SweepRow.all_of
    seen: list[Any] = []

    def stopped(cell: Any, result: Any) -> list[command.SweepRow]:
        if seen:
            raise KeyboardInterrupt
        seen.append(cell)
        return kept(cell, result)

    monkeypatch.setattr(command.SweepRow, "all_of", stopped)
    code, printed, _ = run(capsys, "monday.npz", "tuesday.npz", *GRID, "--json")
    assert code == 130
    document = held("sweep", printed)
    assert document["interrupted"]
    assert len(document["rows"]) == 1
