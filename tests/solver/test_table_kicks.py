"""A kick makes one to three legal exchanges of spare replicas; kicks through tables never make a layer dearer."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eplb_service.placement import Placement, check_layer, check_log2phy
from eplb_service.solver.candidates import from_scratch, kicked, kicked_through_tables
from eplb_service.solver.model import SOLVED, Deployed, Layer, SearchParams, heat_of, homes
from tests.solver.layers_of import KNOWN_EXAMPLE

PARAMS = SearchParams(z=1.4, tree_groups=4, tree_spread=2, tree_beam=4, tree_leaves=8, local_search_steps=256)
KICKED = PARAMS._replace(annealing_tries=6400, tables=SOLVED)


def known_layer(sources: int) -> Layer:
    phy2log_RS = Placement.linear(1, 8, 8, 2).phy2log_LRS[0].copy()
    table_GE = np.tile(Placement.linear(1, 8, 8, 2).default_log2phy()[:, 0], (-(-sources // 8), 1))[:sources]
    deployed = Deployed(
        phy2log_RS,
        np.ascontiguousarray(table_GE),
        np.full((sources, 8), 1 / sources, dtype=np.float32),
        homes(phy2log_RS, 8),
        np.zeros(8, dtype=np.int32),
        np.zeros(sources, dtype=np.int32),
    )
    return Layer(heat_of(KNOWN_EXAMPLE[None, :], 8), deployed)


def one_exchange_away(phy2log_RS: np.ndarray, experts: int) -> set[bytes]:
    """The placement itself, and every one that one spare replica makes by becoming another expert's."""
    found = {phy2log_RS.tobytes()}
    for (r, s), loser in np.ndenumerate(phy2log_RS):
        if (phy2log_RS == loser).sum() > 1:
            for gainer in set(range(experts)) - set(phy2log_RS[r].tolist()):
                after_RS = phy2log_RS.copy()
                after_RS[r, s] = gainer
                found.add(after_RS.tobytes())
    return found


def test_every_possible_exchange_is_made_and_no_other() -> None:
    first_RS = Placement.linear(1, 5, 3, 3).phy2log_LRS[0]
    reachable = {first_RS.tobytes()}
    for _ in range(3):
        reachable = set().union(
            *(one_exchange_away(np.frombuffer(known, dtype=np.int32).reshape(3, 3), 5) for known in reachable)
        )
    found = {kicked(first_RS, 5, random.Random(seed)).tobytes() for seed in range(2000)}
    assert found <= reachable
    assert one_exchange_away(first_RS, 5) - {first_RS.tobytes()} <= found


@pytest.mark.parametrize(("ranks", "slots", "experts"), [(4, 2, 8), (4, 3, 3), (1, 3, 3)])
def test_nothing_is_exchanged_where_no_replica_is_spare_or_no_rank_lacks_one(
    ranks: int, slots: int, experts: int
) -> None:
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0]
    for seed in range(20):
        np.testing.assert_array_equal(kicked(phy2log_RS, experts, random.Random(seed)), phy2log_RS)


def test_sixteen_sources_reach_185_by_kicks_alone() -> None:
    layer, mean = known_layer(16), KNOWN_EXAMPLE.sum() / 8
    without = from_scratch(layer, KICKED._replace(table_kicks=False))
    assert without.par * mean == pytest.approx(200, abs=0.01)
    reached = []
    for seed in range(8):
        found = kicked_through_tables(without, layer, KICKED._replace(seed=seed), 1500)
        check_layer(found.phy2log_RS, 8)
        check_log2phy(found.log2phy_GE, found.phy2log_RS)
        assert found.moves == np.count_nonzero(found.phy2log_RS != layer.deployed.phy2log_RS)
        reached.append(found.par * mean)
    assert max(reached) < 200
    assert np.sum(np.array(reached) < 185.01) >= 6


def test_moves_that_cost_more_than_they_win_are_not_made() -> None:
    layer = known_layer(16)
    without = from_scratch(layer, KICKED._replace(table_kicks=False))
    dear = KICKED._replace(move_price=1.0)
    found = kicked_through_tables(without, layer, dear, 300)
    assert found.par + found.moves <= without.par + without.moves + 1e-4


def test_a_layer_whose_tables_are_no_worse_than_even_shares_is_not_kicked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("kicked")

    monkeypatch.setattr("eplb_service.solver.candidates.kicked_through_tables", unexpected)
    layer = known_layer(16)
    flat = Layer(heat_of(np.full((1, 8), 100.0), 8), layer.deployed)
    assert from_scratch(flat, KICKED).par == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(AssertionError, match="kicked"):
        from_scratch(layer, KICKED)
