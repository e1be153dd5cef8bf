"""Tests that each token reaches a replica of its expert and that no rank receives more than the optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_lab.layer import ExpertParallelMoE, LayerOptions, MoEShape, seeded_experts
from tests.moe import slow_stepwise as slow
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.solver.placed_layer import random_placement
from tests.solver.slow.stepwise import optimum
from worker_agent import stepwise
from worker_agent.live_layer import PlacementAware
from worker_agent.stepwise import ROUNDS, UNKNOWN_CHOICES, StepwiseSplit, rounds_for

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def layers(
    draw: st.DrawFn, most_ranks: int = 10, many: bool = False
) -> tuple[np.ndarray, int, np.random.Generator]:
    """Draw a placement and its number of experts.

    Each rank has up to one spare slot, or half of all slots are spare.
    """
    generator = np.random.default_rng(draw(SEEDS))
    ranks = draw(st.integers(1 + many, most_ranks))
    slots = draw(st.integers(1 + many, 6))
    spare = draw(st.integers(0, min(ranks, ranks * slots - slots)))
    if many:
        spare = ranks * slots // 2
    experts = ranks * slots - spare
    return random_placement(ranks, slots, experts, generator), experts, generator


def splitting(
    shape: MoEShape, phy2log_RS: np.ndarray, dispatcher: str, group: SimulatedGroup
) -> ExpertParallelMoE:
    """Return one rank's layer with the stepwise split."""
    experts = seeded_experts(shape)
    options = LayerOptions(split="step")
    return ExpertParallelMoE(
        shape, phy2log_RS, experts, dispatcher=dispatcher, ep_group=group, options=options
    )


def received(split: StepwiseSplit, phy2log_RS: np.ndarray, counts_E: np.ndarray) -> np.ndarray:
    """Check that each token goes to a replica of its expert, and return the number of tokens per slot."""
    ids_N = np.repeat(np.arange(len(counts_E)), counts_E)
    physical_N = split.physical(torch.arange(len(ids_N)), torch.from_numpy(counts_E)).numpy()
    np.testing.assert_array_equal(phy2log_RS.ravel()[physical_N], ids_N)
    return np.bincount(physical_N, minlength=phy2log_RS.size).reshape(phy2log_RS.shape)


def tables(split: StepwiseSplit) -> dict[str, torch.Tensor]:
    """Return all tensors that depend on the placement."""
    tensors = {
        name: value
        for name, value in vars(split).items()
        if isinstance(value, torch.Tensor) and not name.startswith("_")
    }
    assert len(tensors) == 11
    return tensors


@settings(max_examples=100)
@given(layers(), st.sampled_from((3, 40, 1000)))
def test_the_hottest_rank_is_near_the_optimum_and_within_one_token_with_more_rounds(layer, mean: int) -> None:
    phy2log_RS, experts, generator = layer
    counts_E = generator.poisson(mean * np.exp(generator.normal(0, 1, experts)))
    best = optimum(phy2log_RS, counts_E.astype(float))
    for rounds, load_limit in ((ROUNDS, max(best + 1, 1.005 * best)), (200, best + 1)):
        load_R = received(StepwiseSplit(phy2log_RS, experts, rounds=rounds), phy2log_RS, counts_E).sum(axis=1)
        assert load_R.sum() == counts_E.sum()
        assert load_R.max() <= load_limit + 1e-6


@pytest.mark.parametrize(("ranks", "slots"), [(8, 33), (32, 9), (64, 5)])
@pytest.mark.parametrize("tokens", [256, 1024, 4096, 16384, 65536])
def test_a_step_of_any_size_is_within_one_token_of_the_optimum(ranks: int, slots: int, tokens: int) -> None:
    generator = np.random.default_rng([ranks, tokens])
    for spread in (0.7, 2.0):
        phy2log_RS = random_placement(ranks, slots, 256, generator)
        share_E = np.exp(generator.normal(0, spread, 256))
        counts_E = generator.multinomial(8 * tokens, share_E / share_E.sum())
        split = StepwiseSplit(phy2log_RS, 256)
        ends_P = split.ends(torch.from_numpy(counts_E), 8 * tokens).numpy()
        rank_P = split.physical_P1[:-1].numpy() // slots
        load_R = np.bincount(rank_P, np.diff(ends_P, prepend=0), minlength=ranks)
        above = load_R.max() - optimum(phy2log_RS, counts_E.astype(float))
        assert above <= 1 + 1e-6, spread


@pytest.mark.parametrize(
    ("dispatcher", "length"),
    [("all2allv", None), ("all2allv", 9), ("allgather", None), ("mc2", None), ("mc2", 9)],
)
@pytest.mark.parametrize("tokens", [(3, 0, 7), (1, 1, 1)])
def test_all_ranks_assume_the_same_number_of_choices_in_a_step(
    dispatcher: str, length: int | None, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice_counts: list[int] = []

    def recorded(choices: int) -> int:
        choice_counts.append(choices)
        return rounds_for(choices)

    monkeypatch.setattr(stepwise, "rounds_for", recorded)
    shape = MoEShape(0, 6, 8, 6)
    top_k = 2

    def step(group: SimulatedGroup) -> None:
        phy2log_RS = random_placement(3, 3, 6, np.random.default_rng(0))
        layer = splitting(shape, phy2log_RS, dispatcher, group)
        token_count = tokens[group.rank]
        ids_TK = torch.arange(top_k).repeat(token_count, 1)
        layer(torch.zeros(token_count, 8), ids_TK, torch.ones(token_count, top_k), length=length)

    run_simulated(3, step)
    common = max(tokens) if length is None else length
    unknown = dispatcher == "all2allv" and length is None
    assert choice_counts == [UNKNOWN_CHOICES if unknown else 3 * common * top_k] * 3


@settings(max_examples=40)
@given(layers(6, many=True), st.sampled_from((1, 900)))
def test_each_token_reaches_its_expert_even_after_only_one_round(layer, mean: int) -> None:
    # After one round, the split is so far from converged that slots may be negative or not add up to their experts'
    # tokens.
    phy2log_RS, experts, generator = layer
    counts_E = generator.poisson(mean * np.exp(generator.normal(0, 2, experts)))
    split = StepwiseSplit(phy2log_RS, experts, rounds=1)
    assert received(split, phy2log_RS, counts_E).sum() == counts_E.sum()
    assert (split.ends(torch.from_numpy(counts_E)).diff() >= 0).all()


def test_rounding_keeps_the_optimum_if_ranks_share_experts_in_a_cycle() -> None:
    # Each rank shares an expert with the next rank, and the last with the first. Rounding to nearest gave one rank 14
    # tokens.
    phy2log_RS = np.array([[0, 1, 4], [1, 2, 5], [2, 3, 6], [0, 3, 7]], dtype=np.int32)
    counts_E = np.array([0, 2, 1, 4, 8, 8, 11, 11])
    load_R = received(StepwiseSplit(phy2log_RS, 8, rounds=300), phy2log_RS, counts_E).sum(axis=1)
    assert load_R.max() == 13 == np.ceil(optimum(phy2log_RS, counts_E.astype(float)))


@settings(max_examples=30)
@given(layers(6, many=True))
def test_the_hottest_rank_stays_near_the_optimum_with_many_replicas(layer) -> None:
    phy2log_RS, experts, generator = layer
    counts_E = generator.poisson(60 * np.exp(generator.normal(0, 1, experts)))
    load_R = received(StepwiseSplit(phy2log_RS, experts), phy2log_RS, counts_E).sum(axis=1)
    best = optimum(phy2log_RS, counts_E.astype(float))
    assert load_R.max() <= max(1.02 * best, best + 3)


@settings(max_examples=15)
@given(layers(most_ranks=5), st.sampled_from((2, 300)), st.sampled_from((1, 2, 3, 4, 9)))
def test_sums_are_exact_and_bitwise_identical_on_all_ranks(layer, mean: int, rounds: int) -> None:
    phy2log_RS, experts, generator = layer
    split = StepwiseSplit(phy2log_RS, experts, rounds=rounds)
    counts_E = generator.poisson(mean, experts)
    assert split.ends(torch.from_numpy(counts_E)).tolist() == slow.ends(split, counts_E.tolist(), rounds)


def test_sums_stay_exact_in_the_largest_deployments() -> None:
    generator = np.random.default_rng(0)
    split = StepwiseSplit(random_placement(64, 5, 256, generator), 256)
    # In units of 1/64, with a standard deviation of 2**20 choices per slot, a quarter of 2**22.
    state = torch.from_numpy(np.rint(generator.normal(0, 2.0**26, split.rounds_CM2.shape[2])))
    for round_M2 in split.rounds_CM2:
        forwards = round_M2 @ state
        backwards = round_M2.flip(1) @ state.flip(0)
        assert torch.equal(forwards, backwards)
        exact = slow.product(round_M2[:3], list(map(int, state.tolist())))
        assert forwards[:3].tolist() == [float(x) for x in exact]


def test_a_new_placement_is_installed_in_place() -> None:
    generator = np.random.default_rng(2)
    first_RS, other_RS = (random_placement(6, 4, 20, generator) for _ in range(2))
    split = StepwiseSplit(first_RS, 20)
    addresses = {name: table.data_ptr() for name, table in tables(split).items()}
    split.install(other_RS)
    assert {name: table.data_ptr() for name, table in tables(split).items()} == addresses
    fresh = tables(StepwiseSplit(other_RS, 20))
    for name, table in tables(split).items():
        assert torch.equal(table, fresh[name]), name
    received(split, other_RS, generator.poisson(9, 20))


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2"])
def test_a_layer_splits_tokens_according_to_its_installed_placement(dispatcher: str) -> None:
    ranks = 4
    slots = 3
    experts = 8
    shape = MoEShape(0, experts, 8, 6)
    placements = [random_placement(ranks, slots, experts, np.random.default_rng(seed)) for seed in (3, 4)]
    counts_E = np.array([40, 1, 1, 9, 2, 3, 1, 7])
    ids = np.repeat(np.arange(experts), counts_E)

    def two_steps(group):
        layer = splitting(shape, placements[0], dispatcher, group)
        assert isinstance(layer, PlacementAware)
        layer.to(torch.float32)
        ids_T1 = torch.from_numpy(ids[group.rank :: ranks].copy()).unsqueeze(1)
        hidden_TH = torch.randn(len(ids_T1), 8)
        outputs = [layer(hidden_TH, ids_T1, torch.ones(len(ids_T1), 1))]
        new_layer = splitting(shape, placements[1], dispatcher, group)
        for live, new in zip(layer.expert_weights(), new_layer.expert_weights(), strict=True):
            live.copy_(new)
        layer.install_placement(placements[1])
        outputs.append(layer(hidden_TH, ids_T1, torch.ones(len(ids_T1), 1)))
        torch.testing.assert_close(outputs[0], outputs[1])
        return layer.moe_load[:2].numpy()

    loads_RTS = np.stack(run_simulated(ranks, two_steps))
    for step, phy2log_RS in enumerate(placements):
        received_RS = loads_RTS[:, step]
        np.testing.assert_array_equal(
            np.bincount(phy2log_RS.ravel(), received_RS.ravel(), minlength=experts), counts_E
        )
        assert received_RS.sum(axis=1).max() <= optimum(phy2log_RS, counts_E.astype(float)) + 1 + 1e-6


def test_unsupported_stepwise_splits_are_rejected() -> None:
    with pytest.raises(ValueError, match="layer 3: grouped experts have no replicas"):
        StepwiseSplit.check(3, ["allgather", "moge"], "cpu")
    with pytest.raises(ValueError, match=r"layer 3: .*NPUs do not support"):
        StepwiseSplit.check(3, ["mc2"], "npu")
    StepwiseSplit.check(3, ["mc2"], "cuda")
