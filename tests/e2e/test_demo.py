"""`eplb demo` runs the whole main job on real processes and proves that balancing changes no output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eplb_service.cli import main
from tests.cli.published import held
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eplb_service.cli.main", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)


@pytest.mark.parametrize(
    ("dispatcher", "ranks"), [("all2allv", 2), pytest.param("allgather", 4, marks=pytest.mark.slow)]
)
def test_a_trace_is_served_and_balanced_without_changing_an_output(
    dispatcher: str, ranks: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    popularity_LE = rng.dirichlet(np.full(16, 0.3), size=5)
    counts_TLE = np.stack([[rng.multinomial(96, row) for row in popularity_LE] for _ in range(160)])
    np.savez(tmp_path / "trace.npz", counts=counts_TLE.astype(np.uint16))
    out = tmp_path / "out.json"
    done = _demo(
        *("--ranks", str(ranks), "--redundant", str(ranks), "--layers", "3"),
        *("--steps", "160", "--window", "32", "--interval", "16"),
        *("--dispatcher", dispatcher, "--trace", str(tmp_path / "trace.npz"), "--json", str(out)),
        *("--hidden", "16", "--intermediate", "8", "--picture", str(tmp_path / "end.svg")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = held("demo", out.read_text())
    assert figures["par_balanced"] < figures["par_static"] - 0.1
    assert figures["layers_switched"] >= 3
    assert figures["experts_moved"] > 0
    expert_bytes = 3 * 16 * 8 * 4
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
def test_a_running_service_is_joined(tmp_path: Path) -> None:
    with Service(
        tmp_path, "--window-steps", "32", "--decision-interval", "16", "--store", ":memory:"
    ) as service:
        arguments = ("--address", service.address, "--deployment", "joined", "--steps", "240", "--ranks", "2")
        done = _demo(*arguments, "--layers", "2", "--redundant", "4")
        assert done.returncode == 0, done.stdout + done.stderr
        status = service.status("joined").status
        assert status.layers_switched > 0
        assert service.metric("eplb_steps_received_total", deployment="joined") > 100


@pytest.mark.slow
def test_a_demo_that_switches_nothing_fails_and_says_so() -> None:
    done = _demo("--policy", "none", "--ranks", "2", "--layers", "1", "--steps", "24", "--redundant", "0")
    assert done.returncode == 1
    assert "no layer was switched" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--redundant", "3"], "do not fill 4 ranks evenly; use --redundant 4"),
        (["--dispatcher", "carrier-pigeon"], "unknown dispatcher 'carrier-pigeon'"),
        (["--quant", "int3"], "unknown quantization 'int3'; choose one of none, w8a8"),
        (["--policy", "best"], "policy is 'best'"),
        (["--trace", "missing.npz"], "missing.npz"),
        (["--json", "out.txt"], "must end in .json"),
        (["--ranks", "1"], "--ranks"),
        (["--deployment", "a b"], "--deployment is 'a b'"),
        (["--address", "127.0.0.1:1", "--window", "8"], "--window goes with a service of the demo's own"),
    ],
)
def test_what_a_user_got_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.strip().splitlines()) == 1
