"""Training, decoding with a cache and serving expert-parallel are one and the same function of the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import Placement
from tests.model.small import CONFIG, small_model, write_small_model
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.ranks import run_ranks
from tools.training.trainable_moe import TrainableMoE
from worker_agent.model.checkpoint import Checkpoint
from worker_agent.model.config import ModelConfig
from worker_agent.model.decode import Decoder
from worker_agent.model.expert_parallel import expert_parallel
from worker_agent.model.transformer import ByteTransformer, attend_to_the_past
from worker_agent.moe import DenseMoE, MoEShape, stepwise
from worker_agent.moe.rank_group import RankGroup

ROWS = 4


def _tokens(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def _decoded(model: ByteTransformer, tokens_BT: torch.Tensor) -> torch.Tensor:
    decoder = Decoder(model, len(tokens_BT))
    return torch.stack([decoder.step(column_B) for column_B in tokens_BT.T], dim=1)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 9), experts=st.integers(1, 6), seed=st.integers(0, 99), choices=st.integers(1, 3)
)
def test_the_layer_of_training_equals_the_dense_one(
    tokens: int, experts: int, seed: int, choices: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = MoEShape(0, experts, 8, 4)
    top_k = min(choices, experts)
    moe = TrainableMoE(shape)
    dense = DenseMoE(shape, lambda expert: (moe.w13[expert].detach(), moe.w2[expert].detach()))
    hidden_TH = torch.randn(tokens, 8, generator=generator)
    weights_TK, ids_TK = torch.rand(tokens, experts, generator=generator).topk(top_k)
    torch.testing.assert_close(moe(hidden_TH, ids_TK, weights_TK), dense(hidden_TH, ids_TK, weights_TK))


def test_every_expert_that_was_chosen_learns() -> None:
    moe = TrainableMoE(MoEShape(0, 3, 4, 2))
    ids_TK = torch.tensor([[0, 2], [2, 0]])
    moe(torch.ones(2, 4), ids_TK, torch.full((2, 2), 0.5)).sum().backward()
    assert moe.w2.grad is not None
    assert [bool(expert.any()) for expert in moe.w2.grad] == [True, False, True]


def test_decoding_byte_by_byte_equals_one_pass_over_the_text() -> None:
    model, moes = small_model()
    model.double()
    for moe in moes:
        moe.double()
    tokens_BT = _tokens(3, CONFIG.context)
    positions_BT = torch.arange(CONFIG.context).expand_as(tokens_BT)
    whole_BTV = model(tokens_BT, positions_BT, attend_to_the_past).logits_BTV
    torch.testing.assert_close(_decoded(model, tokens_BT), whole_BTV, rtol=0, atol=1e-5)


def _serve_in_part(path: str, phy2log_LRS: np.ndarray, tokens_BT: torch.Tensor) -> torch.Tensor:
    placement = Placement(phy2log_LRS, CONFIG.experts)
    model, _ = expert_parallel(Checkpoint(Path(path)), placement, dist.group.WORLD)
    return _decoded(model, tokens_BT[dist.get_rank() :: dist.get_world_size()])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_the_experts_say_what_one_alone_says(ranks: int, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "small")
    tokens_BT = _tokens(ROWS, 10)
    alone, _ = expert_parallel(Checkpoint(path), Placement.linear(2, 8, 1, 8), None)
    expected_BTV = _decoded(alone, tokens_BT)
    rng = np.random.default_rng(1)
    for slots in (8 // ranks, 8 // ranks + 1):
        placement = Placement.linear(2, 8, ranks, slots)
        shuffled_LRS = rng.permutation(8).astype(np.int32)[placement.phy2log_LRS]
        parts = run_ranks(ranks, _serve_in_part, str(path), shuffled_LRS, tokens_BT)
        for rank, part_BTV in enumerate(parts):
            torch.testing.assert_close(part_BTV, expected_BTV[rank::ranks], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2", "moge"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dual_batch", [False, True])
def test_every_way_through_the_experts_gives_the_same_bytes(
    dispatcher: str, quantized: bool, dual_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)
    asked = []
    ask = SimulatedGroup.gather_numbers
    monkeypatch.setattr(
        SimulatedGroup,
        "gather_numbers",
        lambda group, *of, **where: asked.append(of) or ask(group, *of, **where),
    )
    weights = Checkpoint(write_small_model(tmp_path / "small"))
    # One more on the first rank.
    tokens_BT = _tokens(ROWS + 1, 6)
    # Grouped experts have no replicas, and a group on each rank.
    slots, groups = (4, 2) if dispatcher == "moge" else (5, 1)
    alone, _ = expert_parallel(
        weights, Placement.linear(2, 8, 1, 8), None, quantized=quantized, expert_groups=groups
    )
    expected_BTV = _decoded(alone, tokens_BT)

    def serve(group: RankGroup) -> torch.Tensor:
        model, layers = expert_parallel(
            weights,
            Placement.linear(2, 8, 2, slots),
            group,
            dispatcher,
            quantized=quantized,
            dual_batch=dual_batch,
            expert_groups=groups,
            most_rows=ROWS // 2 + 1,
        )
        logits_BTV = _decoded(model, tokens_BT[group.rank :: 2])
        assert [int(layer.load_counter) for layer in layers] == [6, 6]
        return logits_BTV

    for rank, part_BTV in enumerate(run_simulated(2, serve)):
        torch.testing.assert_close(part_BTV, expected_BTV[rank::2], rtol=0, atol=1e-6)
    assert not asked


@pytest.mark.parametrize("dual_batch", [False, True])
def test_a_split_by_step_takes_the_rounds_of_steps_so_large(
    dual_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all-to-all ranks do not ask each other, and without the length they would take rounds for thousands."""
    sizes: set[int] = set()
    rounds_for = stepwise.rounds_for
    monkeypatch.setattr(stepwise, "rounds_for", lambda choices: sizes.add(choices) or rounds_for(choices))
    weights = Checkpoint(write_small_model(tmp_path / "small"))

    def serve(group: RankGroup) -> None:
        placement = Placement.linear(2, 8, 2, 5)
        model, _ = expert_parallel(
            weights, placement, group, dual_batch=dual_batch, split="step", most_rows=4
        )
        _decoded(model, _tokens(3 + group.rank, 2))

    run_simulated(2, serve)
    # Two ranks of four rows, or of two in each half, with two choices each.
    assert sizes == {2 * 2 * 2 if dual_batch else 2 * 4 * 2}


def test_the_dense_baseline_has_the_same_active_size() -> None:
    config = ModelConfig()
    assert config.dense.intermediate == config.top_k * config.intermediate
    assert (config.dense.experts, config.dense.top_k) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"experts": 4, "top_k": 5}, "top_k must be 1..4"),
        ({"hidden": 12, "heads": 4}, "even multiple of heads"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"layers": 0}, "must be positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)


def test_a_request_longer_than_the_context_is_refused() -> None:
    decoder = Decoder(small_model()[0], 1)
    decoder.positions_B[0] = CONFIG.context
    with pytest.raises(ValueError, match="longer than the model's context of 24 bytes"):
        decoder.step(torch.zeros(1, dtype=torch.int64))


def test_a_placement_of_another_model_is_refused(tmp_path: Path) -> None:
    weights = Checkpoint(write_small_model(tmp_path / "small"))
    with pytest.raises(ValueError, match="2 layers of 8 experts, the placement 3 of 8"):
        expert_parallel(weights, Placement.linear(3, 8, 1, 8), None)
    with pytest.raises(ValueError, match="8 experts and 2 choices per token do not divide into 4 groups"):
        expert_parallel(weights, Placement.linear(2, 8, 4, 2), None, expert_groups=4)
