"""Tests that the router chooses and weights experts as its slow, simple twin does."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_lab.layer import Router, Scoring
from eplb_lab.layer.router import grouped_routing


@st.composite
def routers(draw: st.DrawFn) -> Router:
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, groups))
    experts = groups * size
    bias = torch.linspace(-0.3, 0.4, experts) if draw(st.booleans()) else None
    return Router(
        experts,
        draw(st.integers(1, size * top_groups)),
        draw(st.sampled_from(Scoring)),
        renormalise=draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        correction_bias_E=bias,
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )


def twin(router: Router, logits: list[float]) -> dict[int, float]:
    """Return the weight of each expert that one token chooses, computed by hand."""
    if router.scoring is Scoring.SOFTMAX:
        powers = [math.exp(logit) for logit in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    bias = [0.0] * len(scores) if router.correction_bias_E is None else router.correction_bias_E.tolist()
    biased_scores = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // router.groups
    judged = 1 if router.correction_bias_E is None else 2

    def merit(group: int) -> float:
        return sum(sorted(biased_scores[group * size : (group + 1) * size])[-judged:])

    best = sorted(range(router.groups), key=merit)[-router.top_groups :]
    eligible = [expert for expert in range(len(scores)) if expert // size in best]
    chosen = sorted(eligible, key=lambda expert: biased_scores[expert])[-router.top_k :]
    total = sum(scores[expert] for expert in chosen) if router.renormalise else 1.0
    return {expert: scores[expert] / total * router.scaling_factor for expert in chosen}


@given(router=routers(), seed=st.integers(0, 99), tokens=st.integers(0, 4))
@settings(deadline=None)
def test_routing_equals_the_slow_twin_for_every_setting(router: Router, seed: int, tokens: int):
    logits_TE = torch.randn(tokens, router.experts, generator=torch.Generator().manual_seed(seed))
    weights_TK, ids_TK = router(logits_TE)
    assert weights_TK.shape == ids_TK.shape == (tokens, router.top_k)
    assert weights_TK.dtype == torch.float32
    assert ids_TK.dtype == torch.int32
    for logits, weights, ids in zip(logits_TE.tolist(), weights_TK.tolist(), ids_TK.tolist(), strict=True):
        expected = twin(router, logits)
        assert set(ids) == set(expected)
        assert weights == pytest.approx([expected[expert] for expert in ids], rel=1e-4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": 0}, r"top_k must be 1\.\.6"),
        ({"top_k": 7}, r"top_k must be 1\.\.6, the number of experts, got 7"),
        ({"experts": 5}, r"router logits must have shape \[T, 5\], got \[3, 6\]"),
        ({"top_k": 3, "custom": grouped_routing(2)}, "6 experts and 3 choices cannot be split evenly into 2"),
        ({"groups": 4}, "6 experts cannot be split evenly into 4 groups"),
        ({"groups": 3, "top_groups": 4}, r"top_groups must be 1\.\.3, the number of groups, got 4"),
        ({"groups": 3, "top_k": 3}, r"top_k must be 1\.\.2, the number of experts in 1 groups, got 3"),
        ({"correction_bias_E": torch.zeros(5)}, r"the correction bias must have shape \[6\], got \[5\]"),
    ],
)
def test_invalid_router_settings_are_rejected(changed: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Router(**({"experts": 6, "top_k": 2} | changed))(torch.zeros(3, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize(("groups", "share"), [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_grouped_routing_chooses_the_best_experts_of_every_group(groups: int, share: int):
    size = 3
    tokens = 5
    logits_TE = torch.randn(tokens, groups * size, generator=torch.Generator().manual_seed(groups))
    router = Router(groups * size, groups * share, custom=grouped_routing(groups), scaling_factor=2.0)
    weights_TK, ids_TK = router(logits_TE)
    for logits_E, weights_K, ids_K in zip(
        logits_TE.tolist(), weights_TK.tolist(), ids_TK.tolist(), strict=True
    ):
        best = [
            sorted(range(group * size, (group + 1) * size), key=lambda e: -logits_E[e])[:share]
            for group in range(groups)
        ]
        expected_ids = sorted(itertools.chain(*best), key=lambda e: -logits_E[e])
        assert ids_K == expected_ids
        total = sum(math.exp(logits_E[e]) for e in expected_ids)
        assert weights_K == pytest.approx([2 * math.exp(logits_E[e]) / total for e in expected_ids], rel=1e-5)
