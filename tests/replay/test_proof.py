"""A proof scores all arms on the same steps, and its intervals contain the true gain as often as they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Placement
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.native import TraceWriter
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace, TraceFacts
from eplb_service.replay import proof
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import TraceFile, jobs_for, replay_file, scene_for
from eplb_service.replay.policy import Setup
from tests.cost.curves import FUSED, H200, plain_rank_us

RANKS = 4
SLOTS = 5
SETUP = Setup(SLOTS, 32, 32)


def made(
    file: TraceFile, costs: Costs | None = None, balancers: tuple[str, ...] = ("deepseek",)
) -> proof.Proof:
    settings = PlannerSettings(split="even")
    jobs = proof.proof_jobs(balancers, SETUP, settings, "even", file.open().steps)
    return proof.prove(file, scene_for(RANKS, costs), jobs, workers=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TraceFile:
    path = tmp_path_factory.mktemp("proof") / "heat.npz"
    np.savez(path, heat=synthetic_heat("static", 160, 2, 16, tokens=512, top_k=2, seed=1))
    return TraceFile(path, ReadAs())


def test_every_arm_is_scored_on_the_same_steps_as_in_a_replay(file: TraceFile) -> None:
    result = made(file)
    assert [arm.name for arm in result.arms] == ["off", "deepseek", "ours", "forced balance"]
    assert {arm.par_T.size for arm in result.arms} == {128}
    jobs = jobs_for(["deepseek", "flashlb"], [SETUP], PlannerSettings(split="even"), hindsight=False)
    replayed = replay_file(file, jobs, scene_for(RANKS), workers=1)
    expected = [replayed.baselines[0], *replayed.policies]
    for arm, policy in zip(result.arms, expected, strict=False):
        assert arm.par_T.mean() == pytest.approx(policy.par_realised)
        assert arm.moves == policy.moves
    off, deepseek, ours, forced = result.rows()
    assert off["gain"] is None
    assert ours["gain"].value == pytest.approx(off["par"] - ours["par"])
    assert 0 < ours["gain"].low < ours["gain"].value < ours["gain"].high
    assert deepseek["above_ours"].value == pytest.approx(deepseek["par"] - ours["par"])
    assert ours["share"].value == pytest.approx(ours["gain"].value / forced["gain"].value)
    assert forced["share"].value == 1
    assert (forced["moves"], ours["above_ours"], ours["moe_ms"]) == (None, None, None)


def test_our_planner_and_the_engine_may_split_tokens_differently(file: TraceFile) -> None:
    off, *others, ours = proof.proof_jobs(["deepseek"], SETUP, PlannerSettings(split="step"), "even", 160)
    assert [job.settings.split for job in (off, *others, ours)] == ["even", "even", "step"]


def test_too_few_steps_are_reported() -> None:
    with pytest.raises(
        proof.ProofError, match="63 steps follow the first window, but a proof needs at least 64"
    ):
        proof.proof_jobs(["deepseek"], SETUP, PlannerSettings(), "even", 95)


def dealt(tokens: int, ranks: int, slots: int) -> list[list[int]]:
    """Deal tokens over the slots one by one: first to the first slot of each rank, then to the second, and so on."""
    loads = [[0] * slots for _ in range(ranks)]
    for token in range(tokens):
        loads[token % ranks][token // ranks % slots] += 1
    return loads


@pytest.mark.parametrize("curve", [None, H200, FUSED])
def test_forced_balance_matches_tokens_dealt_one_by_one(curve: CostCurve | None) -> None:
    counts = [0, 1, 3, 7, 19, 20, 41, 1000]
    heat_TLE = np.zeros((len(counts), 1, 16), dtype=np.int64)
    heat_TLE[:, 0, 2] = counts
    par_TL, us_TL = proof._forced(heat_TLE, RANKS, SLOTS, curve)
    for tokens, par, us in zip(counts, par_TL[:, 0], us_TL[:, 0], strict=True):
        loads = dealt(tokens, RANKS, SLOTS)
        if not tokens:
            assert np.isnan(par)
            assert us == 0
            continue
        assert par == pytest.approx(max(map(sum, loads)) * RANKS / tokens)
        if curve is not None:
            assert us == pytest.approx(max(plain_rank_us(curve, slots, tokens) for slots in loads))


def test_a_cost_curve_adds_times_for_all_replayed_arms(file: TraceFile) -> None:
    result = made(file, Costs(curve=H200))
    for row in result.rows():
        assert row["moe_ms"] > 0
        assert (row["saved_ms"] is None) == (row["arm"] == "off")


def test_the_recorded_balance_is_an_arm_with_its_moves(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    first = Placement.linear(2, 16, RANKS, SLOTS).phy2log_LRS
    second = first.copy()
    # Halfway through, one slot of layer 1 receives a different expert.
    second[1, 3, 4] = next(expert for expert in range(16) if expert not in first[1, 3])
    slot_heat_TLP = generator.integers(1, 30, (160, 2, RANKS * SLOTS))
    epoch_TL = np.zeros((160, 2), dtype=np.int64)
    epoch_TL[80:, 1] = 1
    with TraceWriter(tmp_path / "a.zarr", TraceFacts(ranks=RANKS, slots=SLOTS), 2, 16) as writer:
        for epoch, placed in enumerate((first, second)):
            for layer in range(2):
                writer.place(layer, epoch, placed[layer])
        writer.append(slot_heat_TLP, epoch_TL)
    served = made(TraceFile(tmp_path / "a.zarr", ReadAs())).arm("as served")
    loads_TLR = slot_heat_TLP[32:].reshape(128, 2, RANKS, SLOTS).sum(axis=3)
    expected = (loads_TLR.max(axis=2) / loads_TLR.mean(axis=2)).mean(axis=1)
    np.testing.assert_allclose(served.par_T, expected)
    assert served.moves == 1
    trace = ArrayTrace(np.ones((160, 2, 16), dtype=np.int64), TraceFacts(ranks=RANKS, slots=SLOTS))
    assert proof.as_served(trace, SETUP, scene_for(RANKS)) is None


def test_independent_blocks_have_students_t_interval() -> None:
    ascending = np.sort(np.random.default_rng(0).normal(1.0, 0.3, 16))
    # Low and high values take turns, so that neighbours are not positively correlated.
    values = np.stack([ascending[:8], ascending[8:]], axis=1).ravel()
    estimate = proof.interval(values)
    low, high = stats.t.interval(0.95, 15, values.mean(), stats.sem(values))
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=2e-3)


@pytest.mark.parametrize("correlation", [0.0, 0.4])
def test_intervals_contain_the_mean_as_often_as_they_claim(correlation: float) -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        noise = generator.normal(size=96)
        for number in range(1, 96):
            noise[number] += correlation * noise[number - 1]
        estimate = proof.interval(noise[-16:])
        covered += estimate.low <= 0 <= estimate.high
    assert 0.90 <= covered / 1000 <= 0.98


def test_share_intervals_contain_the_true_share_as_often_as_they_claim() -> None:
    generator = np.random.default_rng(4)
    covered = 0
    for _ in range(1000):
        possible_B = generator.normal(0.5, 0.1, 16)
        estimate = proof.share(0.7 * possible_B + generator.normal(0, 0.05, 16), possible_B)
        covered += estimate.low <= 0.7 <= estimate.high
    assert 0.92 <= covered / 1000 <= 0.98


def test_abba_cancels_a_trend_that_favours_one_order() -> None:
    load_B = np.linspace(2.0, 1.0, 16)
    assert proof.abba(load_B, load_B - 0.25) == pytest.approx(np.full(4, 0.25))
    assert (load_B[0::2] - (load_B - 0.25)[1::2]).mean() > 0.3


def test_blocks_without_tokens_are_ignored() -> None:
    values_B = np.array([0.5, np.nan, 0.7, 0.6])
    assert proof.interval(values_B).value == pytest.approx(0.6)
    assert np.isnan(proof.interval(np.full(4, np.nan)).value)
    assert np.isnan(proof.share(values_B, np.zeros(4)).value)
