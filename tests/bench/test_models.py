"""Tests that models of newer classes of balancers match their slow twins, and appear in ``eplb bench``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_core.placement import Placement
from eplb_lab.bench import models
from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.scoring import peak_to_average, stale_par, stepwise_par
from eplb_service.cli import main
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.published import checked_document

HEAT_TLE = synthetic_heat("drift", 60, 2, 16, tokens=512, top_k=2, seed=1)
SCENARIO = Scenario("drawn", HEAT_TLE, ranks=4, slots=5, window=20)


def slow_refresh(heat_E: list[int], homes: list[int], ranks: int, spare: int) -> tuple[list[int], int]:
    """Compute the load of each rank and the number of replicas by definition."""
    tokens = {(expert, rank): 0 for expert in range(len(heat_E)) for rank in range(ranks)}
    held = set(enumerate(homes))
    for expert, rank in held:
        tokens[expert, rank] = heat_E[expert]
    copies = [0] * ranks
    mean = -(-sum(heat_E) // ranks)
    while True:
        loads = [sum(tokens[expert, rank] for expert in range(len(heat_E))) for rank in range(ranks)]
        hot = loads.index(max(loads))
        options = [
            (min(loads[hot] - mean, mean - loads[rank], tokens[expert, hot]), -expert, -rank)
            for expert in range(len(heat_E))
            for rank in range(ranks)
            if (expert, rank) in held or copies[rank] < spare
        ]
        amount, expert, rank = max(options)
        if amount <= 0:
            return loads, sum(copies)
        tokens[-expert, hot] -= amount
        tokens[-expert, -rank] += amount
        if (-expert, -rank) not in held:
            held.add((-expert, -rank))
            copies[-rank] += 1


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_refreshed_replicas_match_the_slow_twin(spare: int) -> None:
    generator = np.random.default_rng(spare)
    heat_TE = generator.integers(0, 60, (40, 8)) * (generator.random((40, 8)) < 0.6)
    homes = [expert // 2 for expert in range(8)]
    home_ER = np.array(homes)[:, None] == np.arange(4)
    load_TR = np.empty((40, 4))
    fetched = models.refresh_steps(heat_TE.astype(np.int64), home_ER, spare, load_TR)
    expected = [slow_refresh(heat_E, homes, 4, spare) for heat_E in heat_TE.tolist()]
    assert load_TR.tolist() == [loads for loads, _ in expected]
    assert fetched == sum(copies for _, copies in expected)
    assert (fetched > 0) == (spare > 0)


def test_a_refresh_on_exact_counts_is_nearly_balanced_and_fetches_in_each_step() -> None:
    [first, second] = models.exact_refresh(SCENARIO)
    placed_LRS = Placement.linear(2, 16, 4, 5).phy2log_LRS
    for number, (par, fetched) in enumerate((first, second)):
        assert 1 <= par < stepwise_par(SCENARIO.served(number), placed_LRS).mean()
        assert fetched >= 20


def test_pool_slots_go_only_to_the_layers_that_gain() -> None:
    heat_LE = np.full((3, 8), 10.0)
    heat_LE[1, :2] = 40
    home_ER = np.arange(8)[:, None] // 2 == np.arange(4)
    held_LER = models.pooled(heat_LE, home_ER, slots=2)
    assert held_LER[[0, 2]].sum(axis=(1, 2)).tolist() == [8, 8]
    assert (held_LER[1] >= home_ER).all()
    assert (held_LER.sum(axis=(0, 1)) - 3 * home_ER.sum(axis=0)).max() <= 2
    share_ER = held_LER[1] / held_LER[1].sum(axis=1, keepdims=True)
    assert (
        peak_to_average((heat_LE[1] @ share_ER)[None]) < peak_to_average((heat_LE[1] @ home_ER)[None]) / 1.5
    )


def test_a_pool_without_slots_moves_nothing() -> None:
    bare = Scenario("bare", HEAT_TLE, ranks=4, slots=4, window=20)
    assert [fetched for _, fetched in models.shared_pool(bare)] == [0, 0]
    assert sum(fetched for _, fetched in models.shared_pool(SCENARIO)) > 0


def test_shares_come_from_the_previous_step() -> None:
    placed_LRS = Placement.linear(1, 16, 4, 5).phy2log_LRS
    same_TLE = np.repeat(HEAT_TLE[:1, :1], 3, axis=0)
    assert stale_par(same_TLE, same_TLE[0], placed_LRS) == pytest.approx(stepwise_par(same_TLE, placed_LRS))
    changed_TLE = HEAT_TLE[:, :1]
    assert stale_par(changed_TLE[1:], changed_TLE[0], placed_LRS) > stepwise_par(changed_TLE[1:], placed_LRS)


def test_bench_shows_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "trace.npz", heat=HEAT_TLE)
    shape = ["--heat", str(tmp_path / "trace.npz"), "--ranks", "4", "--redundant", "4", "--window", "20"]
    assert main.run(["bench", *shape, "--peers", "models", "--json"]) == 0
    policies = checked_document("bench", capsys.readouterr().out)["policies"]
    assert list(policies)[3:] == ["shares one step old (model)", *models.MODELS]
    assert policies["exact refresh (model)"]["par_realised"] < policies["flashlb (ours)"]["par_realised"]
    assert main.run(["bench", *shape, "--peers", "models"]) == 0
    assert "Models are implemented from published descriptions" in capsys.readouterr().out
