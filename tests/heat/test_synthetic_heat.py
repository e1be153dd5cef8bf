"""Synthetic heat has distinct experts per token, is reproducible, and changes over time as its kind says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.heat.window import HeatError
from eplb_service.io.synthetic import KINDS, synthetic_heat


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 130),
    layers=st.integers(1, 3),
    experts=st.integers(1, 40),
    tokens=st.integers(1, 300),
    seed=st.integers(0, 10),
    data=st.data(),
)
def test_a_router_could_produce_every_step(kind, steps, layers, experts, tokens, seed, data):
    top_k = data.draw(st.integers(1, experts))
    heat_TLE = synthetic_heat(kind, steps, layers, experts, tokens, top_k, seed)
    assert heat_TLE.shape == (steps, layers, experts)
    assert heat_TLE.dtype == np.int32
    assert heat_TLE.min() >= 0
    assert heat_TLE.max() <= tokens
    assert (heat_TLE.sum(axis=2) == tokens * top_k).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_determines_the_heat(kind):
    first, same, different = (synthetic_heat(kind, 20, 2, 32, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, different)


def share_change(heat_TLE):
    """Return the distance between the expert shares of the heat's two halves, averaged over the layers, from 0 to 1."""
    totals = [half.sum(axis=0) for half in np.array_split(heat_TLE, 2)]
    halves = np.stack([total / total.sum(axis=1, keepdims=True) for total in totals])
    return float(np.abs(halves[0] - halves[1]).sum(axis=1).mean() / 2)


def test_each_kind_changes_over_time_as_its_name_says():
    static = synthetic_heat("static", 400, 4, 64, seed=3)
    drift = synthetic_heat("drift", 400, 4, 64, seed=3)
    assert share_change(static) < 0.02
    assert share_change(drift) > 0.1

    phased = synthetic_heat("phased", 400, 4, 64, seed=3)
    assert share_change(phased[:35]) < 0.03
    assert share_change(np.concatenate([phased[:35], phased[62:75]])) > 0.15

    bursty = synthetic_heat("bursty", 400, 4, 64, seed=3)
    swing = (bursty.std(axis=0) / bursty.mean(axis=0)).mean()
    assert swing > 2 * (static.std(axis=0) / static.mean(axis=0)).mean()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "spiky"}, "choose one of static, drift, phased, bursty"),
        ({"steps": 0}, "got 0 steps"),
        ({"top_k": 33}, "1..32 choices"),
        ({"tokens": 0}, "0 tokens"),
    ],
)
def test_impossible_sizes_and_unknown_kinds_are_rejected(changed, message):
    with pytest.raises(HeatError, match=message):
        synthetic_heat(**{"kind": "static", "steps": 4, "layers": 2, "experts": 32, **changed})
