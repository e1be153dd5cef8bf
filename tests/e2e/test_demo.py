"""Tests that `eplb demo` serves and balances a model on real processes and that balancing changes no output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.cli import main
from tests.cli.published import checked_document
from tests.e2e.service import Service
from tests.model.transformers_models import write_checkpoint
from tests.moe.pairwise import Row, pairwise

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


STEPS = 160
RANKS = 4
REQUESTS = 32
MOST_PAR_BY_STEP = 1.06
GROUPED_ONLY = "--dispatcher moge needs --redundant 0 and --split tables"


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eplb_service.cli.main", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)


@pytest.mark.parametrize(
    ("dispatcher", "ranks"), [("all2allv", 2), pytest.param("allgather", 4, marks=pytest.mark.slow)]
)
def test_a_trace_is_served_and_balanced_without_changing_an_output(dispatcher, ranks, tmp_path) -> None:
    rng = np.random.default_rng(3)
    popularity_LE = rng.dirichlet(np.full(16, 0.3), size=3)
    counts_TLE = np.stack([[rng.multinomial(96, row) for row in popularity_LE] for _ in range(160)])
    np.savez(tmp_path / "trace.npz", counts=counts_TLE.astype(np.uint16))
    out = tmp_path / "out.json"
    done = _demo(
        *("--ranks", str(ranks), "--redundant", str(ranks), "--steps", "160"),
        *("--dispatcher", dispatcher, "--trace", str(tmp_path / "trace.npz"), "--json", str(out)),
        *("--picture", str(tmp_path / "end.svg")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = checked_document("demo", out.read_text())
    assert figures["par_balanced"] < figures["par_static"] - 0.1
    assert figures["layers_switched"] >= 3
    assert figures["experts_moved"] > 0
    expert_bytes = 3 * 128 * 64 * 4
    assert figures["bytes_moved"] == figures["experts_moved"] * expert_bytes
    assert 0 <= figures["max_abs_output_diff"] <= figures["float32_rounding_bound"] < 1e-3
    assert (figures["steps"], figures["ranks"], figures["layers"]) == (160, ranks, 3)
    for with_or_without in ("with_agent", "without_agent"):
        times = figures["step_ms"][with_or_without]
        assert 0 < times["p50"] <= times["p99"]
    assert "PAR balanced" in done.stdout
    picture = (tmp_path / "end.svg").read_text()
    assert picture.startswith("<svg")
    assert "@font-face" not in picture


@pytest.mark.slow
def test_the_demo_can_join_a_running_service(tmp_path: Path) -> None:
    with Service(
        tmp_path, "--window-steps", "32", "--decision-interval", "16", "--store", ":memory:"
    ) as service:
        arguments = ("--address", service.address, "--deployment", "joined", "--steps", "240", "--ranks", "2")
        done = _demo(*arguments, "--redundant", "4")
        assert done.returncode == 0, done.stdout + done.stderr
        status = service.status("joined").status
        assert status.layers_switched > 0
        assert service.metric("eplb_steps_received_total", deployment="joined") > 100


@pytest.mark.slow
def test_a_demo_without_a_layer_switch_fails_with_the_reason() -> None:
    done = _demo("--ranks", "2", "--steps", "24")
    assert done.returncode == 1
    assert "no layer was switched" in done.stdout


def _model_served(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run a demo and return its figures and output.

    Check that the balanced and the unbalanced model generate the same bytes.
    """
    done = _demo("--steps", str(STEPS), "--json", str(folder / "out.json"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = checked_document("demo", (folder / "out.json").read_text())
    assert figures["generated_bytes_identical"] is True
    assert figures["generated_bytes"] > STEPS * RANKS * REQUESTS / 2
    return figures, done.stdout


@pytest.mark.slow
def test_the_balanced_model_generates_the_bytes_of_the_unbalanced_one(tmp_path: Path) -> None:
    figures, shown = _model_served(tmp_path)
    assert figures["layers_switched"] >= 4
    assert figures["par_balanced"] < figures["par_static"] - 0.1
    assert figures["max_abs_output_diff"] <= figures["float32_rounding_bound"]
    assert "all identical to the unbalanced model" in " ".join(shown.replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_a_checkpoint_is_served_and_balanced(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", name)
    arguments = ("--checkpoint", str(folder), "--ranks", "2", "--redundant", "4", "--steps", "160")
    done = _demo(*arguments, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = checked_document("demo", (tmp_path / "out.json").read_text())
    assert figures["generated_bytes_identical"] is True
    assert figures["layers"] == 2
    assert figures["layers_switched"] >= 1


OPTIONS: dict[str, list[Any]] = {
    "--dispatcher": ["all2allv", "allgather", "mc2", "moge"],
    "--quant": ["none", "w8a8"],
    "--split": ["tables", "deal", "step"],
    "--dual-batch": [False, True],
    "--tensor-parallel": ["1", "2"],
}


def _allowed(row: Row) -> bool:
    """Return True if the options can be combined. Grouped experts have no replicas over which to split tokens."""
    return row.get("--dispatcher") != "moge" or row.get("--split", "tables") == "tables"


def _arguments(row: Row) -> list[str]:
    dual_batch = ["--dual-batch"] if row["--dual-batch"] else []
    redundant = ["--redundant", "0"] if row["--dispatcher"] == "moge" else []
    named = [text for name in OPTIONS if name != "--dual-batch" for text in (name, row[name])]
    return [*named, *dual_batch, *redundant]


@pytest.mark.slow
@pytest.mark.parametrize("row", pairwise(OPTIONS, _allowed), ids=lambda row: " ".join(_arguments(row)))
def test_every_pair_of_options_serves_the_same_bytes(row: Row, tmp_path: Path) -> None:
    figures, _ = _model_served(tmp_path, *_arguments(row))
    if row["--dispatcher"] == "moge":
        # Every token has the same number of choices on each rank, and no expert may leave its rank, so there is nothing
        # to balance.
        assert figures["layers_switched"] == 0
        assert figures["par_balanced"] == figures["par_static"] == 1.0
        return
    assert figures["layers_switched"] >= 1
    par_limit = MOST_PAR_BY_STEP if row["--split"] == "step" else figures["par_static"] - 0.1
    assert figures["par_balanced"] < par_limit


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--redundant", "3"], "cannot be split evenly over 4 ranks; use --redundant 4"),
        (["--dispatcher", "carrier-pigeon"], "unknown dispatcher 'carrier-pigeon'"),
        (["--quant", "int3"], "unknown quantisation 'int3'; choose one of none, w8a8"),
        (["--trace", "missing.npz"], "missing.npz"),
        (["--json", "out.txt"], "must end in .json"),
        (["--ranks", "1"], "--ranks"),
        (["--checkpoint", ".", "--dual-batch"], "cannot be combined with --checkpoint"),
        (["--checkpoint", "."], "config.json"),
        (["--deployment", "a b"], "--deployment is 'a b'"),
        (["--trace", "any.npz", "--quant", "w8a8"], "cannot be combined with --trace"),
        (["--tensor-parallel", "3"], "--ranks 4 is not a multiple of --tensor-parallel 3"),
        (["--redundant", "6"], "use --redundant 8"),
        (["--split", "even"], "unknown split 'even'; choose one of tables, deal, step"),
        (["--dispatcher", "moge"], GROUPED_ONLY),
        (["--dispatcher", "moge", "--redundant", "0", "--split", "deal"], GROUPED_ONLY),
        (["--dispatcher", "moge", "--redundant", "8", "--split", "step", "--quant", "w8a8"], GROUPED_ONLY),
        (["--dispatcher", "moge", "--redundant", "0", "--ranks", "8"], "use --ranks 2 or 4"),
    ],
)
def test_a_user_error_prints_one_line_and_exits_with_code_2(arguments, complaint, capsys) -> None:
    assert main.run(["demo", *arguments]) == 2
    stderr = capsys.readouterr().err
    assert complaint in stderr
    assert len(stderr.strip().splitlines()) == 1
