"""``eplb bench`` compares the policies' figures and lists each excluded policy with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from eplb_core.placement import Placement, mean_par
from eplb_lab.bench import closed_loop
from eplb_lab.bench.closed_loop import LEFT_ALONE, Entrant, Scenario, compare
from eplb_lab.bench.decision import Decision, Scene
from eplb_lab.bench.peers import archives
from eplb_lab.bench.scoring import even_par, realised_par, stepwise_par
from eplb_service.cli import main
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.replay.moves import arrivals
from tests.cli.published import checked_document


@dataclass
class StubContest:
    """Stub contest in which every policy except ``lazy``, which fails, shifts all experts to the next rank."""

    calls: int = 0
    failures: tuple[object, ...] = ()

    def decide(self, name: str, scene: Scene, *, fresh: bool = True, **options: object) -> Decision | None:
        self.calls += 1
        if name == "lazy":
            return None
        moved = np.roll(scene.placement_LRS, 1, axis=1)
        return Decision(moved, None, None, len(moved), 0.25 if fresh else 0.5, 2.0 if fresh else 1.0)

    def warm_up(self, names: list[str], scene: Scene) -> list[str]:
        assert "none" not in names
        return [name for name in names if name != "broken"]


def test_figures_cover_the_window_after_each_decision() -> None:
    heat_TLE = synthetic_heat("drift", 50, 2, 8, tokens=64, top_k=2, seed=3)
    scenario = Scenario("a", heat_TLE, ranks=4, slots=3, window=16)
    by_step = Entrant("by step", "none", by_step=True)
    entrants = [LEFT_ALONE, Entrant("mover", "mover"), Entrant("lazy", "lazy"), by_step]
    figures = compare(StubContest(), scenario, entrants)  # type: ignore[arg-type]
    alone, mover, stepwise = figures["policies"].values()
    linear = Placement.linear(2, 8, 4, 3)
    served = [heat_TLE[16:32], heat_TLE[32:48]]
    expected = [
        float(mean_par(realised_par(window_TLE, 3, linear.default_log2phy()))) for window_TLE in served
    ]
    assert alone["par_realised_per_window"] == pytest.approx(expected)
    assert alone["par_realised"] == pytest.approx(expected[1])
    assert alone["moves"] == [0, 0]
    once = np.roll(linear.phy2log_LRS, 1, axis=1)
    first, second = (Placement(np.roll(once, by, axis=1), linear.experts) for by in (0, 1))
    assert mover["moves"] == [
        arrivals(linear.phy2log_LRS, first.phy2log_LRS).sum(),
        arrivals(first.phy2log_LRS, second.phy2log_LRS).sum(),
    ]
    assert (mover["cpu_ms_mean"], mover["solve_ms_mean"]) == (500.0, 1000.0)
    assert mover["moves_per_decision"] == mover["moves"][1]
    assert 1 < figures["noise_floor"] <= alone["par_realised"]
    expected = [float(mean_par(stepwise_par(window_TLE, linear.phy2log_LRS))) for window_TLE in served]
    assert stepwise["par_realised_per_window"] == pytest.approx(expected)


def test_a_policy_that_fails_the_warm_up_is_never_called() -> None:
    contest = StubContest()
    scenario = Scenario("a", HEAT_TLE, 4, 5, 20)
    figures = compare(contest, scenario, [LEFT_ALONE, Entrant("broken", "broken")])  # type: ignore[arg-type]
    assert contest.calls == 0
    assert list(figures["policies"]) == ["left alone"]


def test_layers_and_windows_without_tokens_are_ignored() -> None:
    heat_TLE = np.zeros((8, 2, 4), dtype=np.int64)
    heat_TLE[:, 1] = 1
    assert np.isnan(even_par(heat_TLE, Placement.linear(2, 4, 2, 2).phy2log_LRS)[0])
    heat_TLE[2:4, 1, 0] = 4
    heat_TLE[6:] = 0
    figures = compare(StubContest(), Scenario("a", heat_TLE, 2, 2, 2), [LEFT_ALONE])  # type: ignore[arg-type]
    alone = figures["policies"]["left alone"]
    first_par, second_par, idle = alone["par_realised_per_window"]
    assert (first_par, second_par) == pytest.approx((10 / 7, 1.0))
    assert np.isnan(idle)
    assert (alone["par_realised"], figures["noise_floor"]) == pytest.approx((1.0, 1.0))


HEAT_TLE = synthetic_heat("static", 60, 2, 16, tokens=512, top_k=2, seed=1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npz"
    np.savez(path, heat=HEAT_TLE)
    return path


def test_built_in_policies_are_compared_on_a_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--ranks", "4", "--redundant", "4", "--window", "20"]
    arguments = ["bench", "--heat", str(trace), *shape, "--peers", "none"]
    assert main.run([*arguments, "--json"]) == 0
    reported = checked_document("bench", capsys.readouterr().out)
    assert list(reported["policies"]) == ["left alone", "flashlb (ours)", "deepseek (ours)"]
    alone, flashlb, deepseek = reported["policies"].values()
    assert flashlb["par_realised"] < alone["par_realised"]
    assert deepseek["par_realised"] < alone["par_realised"]
    assert (reported["decisions"], reported["slots"], reported["failures"]) == (2, 5, [])
    assert flashlb["source"] == "eplb-service"
    assert min(flashlb["cpu_ms_mean"], flashlb["solve_ms_mean"]) > 0


def test_the_shipped_recording_is_compared_without_options(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = Path(__file__).parents[2] / "docs" / "examples" / "byte_moe_decoding.npz"
    assert main.run(["bench", "--heat", str(shipped), "--ranks", "8", "--peers", "none", "--json"]) == 0
    reported = checked_document("bench", capsys.readouterr().out)
    assert (reported["window_steps"], reported["decisions"], reported["failures"]) == (64, 3, [])
    alone, flashlb, deepseek = (policy["par_realised"] for policy in reported["policies"].values())
    assert reported["noise_floor"] < flashlb < alone
    assert reported["noise_floor"] < deepseek < alone


def test_a_missing_peer_is_reported_and_the_other_policies_are_compared(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="PEERS ARE NOT TESTED: torch is not installed")
    monkeypatch.setattr(archives, "SOURCES", tmp_path / "peers")
    monkeypatch.setattr(closed_loop, "OWN", ())
    arguments = ["--ranks", "4", "--window", "20", "--peers", "vllm", "--no-fetch"]
    assert main.run(["bench", "--heat", str(trace), *arguments]) == 0
    out, err = capsys.readouterr()
    assert "left alone" in out
    assert "a perfectly balanced placement would have about" in out
    assert "vLLM default is excluded: vllm 0.33.0 is not in" in err
