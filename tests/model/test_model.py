"""Tests that training, cached decoding and expert-parallel serving compute the same function.

Also tests that checkpoints are complete.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement
from eplb_lab.layer import DenseMoE, MoEShape
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.model.checkpoint import EMBEDDED, Checkpoint
from eplb_lab.model.expert_parallel import expert_parallel
from eplb_lab.model.serving import PHASES, Decoder, Server, Traffic, _draw, prompts_by_domain
from eplb_lab.model.transformer import ByteTransformer, ModelConfig, attend_to_the_past
from tests.model.small import CONFIG, small_model, write_small_model
from tests.moe.simulated import SimulatedGroup, run_simulated
from tools.train_model import TrainableMoE
from worker_agent import stepwise

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
def test_the_training_layer_equals_the_dense_layer(
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


def test_decoding_byte_by_byte_equals_one_pass_over_the_text() -> None:
    model, moes = small_model()
    model.double()
    for moe in moes:
        moe.double()
    tokens_BT = _tokens(3, CONFIG.context)
    positions_BT = torch.arange(CONFIG.context).expand_as(tokens_BT)
    whole_BTV = model(tokens_BT, positions_BT, attend_to_the_past).logits_BTV
    torch.testing.assert_close(_decoded(model, tokens_BT), whole_BTV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2", "moge"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dual_batch", [False, True])
def test_every_combination_of_options_gives_the_same_logits(
    dispatcher: str, quantized: bool, dual_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_calls = []
    ask = SimulatedGroup.gather_numbers
    monkeypatch.setattr(
        SimulatedGroup,
        "gather_numbers",
        lambda group, *of, **where: gather_calls.append(of) or ask(group, *of, **where),
    )
    weights = Checkpoint(write_small_model(tmp_path / "small"))
    # The first rank has one more row.
    tokens_BT = _tokens(ROWS + 1, 6)
    # Grouped experts have no replicas, and each rank holds one group.
    slots, groups = (4, 2) if dispatcher == "moge" else (5, 1)
    alone, _ = expert_parallel(
        weights,
        Placement.linear(2, 8, 1, 8),
        None,
        quantization="w8a8" if quantized else "none",
        expert_groups=groups,
    )
    expected_BTV = _decoded(alone, tokens_BT)

    def serve(group: RankGroup) -> torch.Tensor:
        model, layers = expert_parallel(
            weights,
            Placement.linear(2, 8, 2, slots),
            group,
            dispatcher,
            quantization="w8a8" if quantized else "none",
            dual_batch=dual_batch,
            expert_groups=groups,
            most_rows=ROWS // 2 + 1,
        )
        logits_BTV = _decoded(model, tokens_BT[group.rank :: 2])
        assert [int(layer.load_counter) for layer in layers] == [6, 6]
        return logits_BTV

    for rank, part_BTV in enumerate(run_simulated(2, serve)):
        torch.testing.assert_close(part_BTV, expected_BTV[rank::2], rtol=0, atol=1e-6)
    assert not gather_calls


@pytest.mark.parametrize("dual_batch", [False, True])
def test_a_stepwise_split_runs_the_rounds_for_its_step_size(
    dual_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all-to-all, ranks do not exchange their batch sizes.

    If the maximum length were unknown, they would run the rounds for thousands of choices.
    """
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
    # Two ranks, each with four rows (or two rows in each half), with two choices per row.
    assert sizes == {2 * 2 * 2 if dual_batch else 2 * 4 * 2}


def test_a_request_longer_than_the_context_is_rejected() -> None:
    decoder = Decoder(small_model()[0], 1)
    decoder.positions_B[0] = CONFIG.context
    with pytest.raises(ValueError, match="longer than the model's context of 24 bytes"):
        decoder.step(torch.zeros(1, dtype=torch.int64))


def test_groups_that_do_not_divide_the_choices_are_rejected(tmp_path: Path) -> None:
    weights = Checkpoint(write_small_model(tmp_path / "small"))
    with pytest.raises(
        ValueError, match="8 experts and 2 choices per token cannot be split evenly into 4 groups"
    ):
        expert_parallel(weights, Placement.linear(2, 8, 4, 2), None, expert_groups=4)


def test_a_checkpoint_is_read_with_its_stored_precision(tmp_path: Path) -> None:
    model, moes = small_model()
    checkpoint = Checkpoint(write_small_model(tmp_path / "small"))
    assert checkpoint.config == CONFIG
    read = ByteTransformer(CONFIG, moes)
    checkpoint.fill(read)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.bfloat16().float()), name
    w13_IH, w2_HI = checkpoint.experts(1)(3)
    assert torch.equal(w13_IH, moes[1].w13[3].bfloat16().float())
    assert torch.equal(w2_HI, moes[1].w2[3].bfloat16().float())


def test_the_embedded_model_is_included_in_the_package() -> None:
    assert Checkpoint().config == ModelConfig()
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 8 * 2**20


LENGTH = 20


class RepeatedRequest(Traffic):
    """Sends the same request in every row, forever."""

    def request(self, step: int, row: int) -> tuple[str, bytes]:
        return "sql", b"SELECT"


def _served(rows: int, steps: int) -> np.ndarray:
    model, _ = small_model()
    server = Server(model, RepeatedRequest(steps, 0, 0), rows, LENGTH, 0.0, 0)
    return np.array([server.step()[0] for _ in range(steps)])


def test_a_request_reads_its_prompt_and_then_its_own_bytes() -> None:
    model, _ = small_model()
    decoder = Decoder(model, 1)
    fed = list(b"SELECT")
    expected = []
    for place in range(LENGTH):
        logits_BV = decoder.step(torch.tensor([fed[place]]))
        if place >= 5:
            expected.append(int(logits_BV.argmax()))
            fed.append(expected[-1])
    answered = _served(1, 1 + LENGTH)[1:, 0]
    assert answered.tolist() == [-1] * 5 + expected


def test_rows_do_not_affect_each_other_and_end_at_different_steps() -> None:
    alone = _served(1, 3 * LENGTH)[1 : 1 + LENGTH, 0].tolist()
    together_TB = _served(4, 3 * LENGTH)
    first_ends = []
    for row_T in together_TB.T.tolist():
        begins = [step for step in range(1, LENGTH + 1) if row_T[step : step + LENGTH] == alone]
        assert len(begins) == 1
        first_ends += begins
    assert len(set(first_ends)) == 4


def test_requests_in_flight_are_counted_by_domain() -> None:
    model, _ = small_model()
    traffic = RepeatedRequest(9, 0, 0)
    server = Server(model, traffic, 3, LENGTH, 1.0, 0)
    server.step()
    in_flight_D = server.in_flight()
    assert in_flight_D[traffic.domains.index("sql")] == in_flight_D.sum() == 3


def test_each_phase_uses_its_own_domains_and_every_domain_has_prompts() -> None:
    traffic = Traffic(400, rank=1, seed=3)
    domain_counts: dict[int, Counter[str]] = {phase: Counter() for phase in range(len(PHASES))}
    for step in range(400):
        domain, prompt = traffic.request(step, row=step % 7)
        domain_counts[traffic.phase(step)][domain] += 1
        assert prompt in prompts_by_domain()[domain]
        assert len(prompt) <= 48
    for phase, domains in enumerate(PHASES.values()):
        assert domain_counts[phase].keys() == set(domains)
    assert sorted(domain for domains in PHASES.values() for domain in domains) == traffic.domains


def test_requests_are_reproducible_and_differ_between_ranks_and_seeds() -> None:
    def questions(rank: int, seed: int) -> list[tuple[str, bytes]]:
        return [Traffic(64, rank, seed).request(step, 0) for step in range(64)]

    assert questions(0, 1) == questions(0, 1)
    assert questions(0, 1) != questions(1, 1)
    assert questions(0, 1) != questions(0, 2)


def test_sampled_bytes_follow_their_probabilities_and_depend_only_on_the_seed() -> None:
    logits_BV = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).expand(20_000, 3)

    def drawn(temperature: float, seed: int) -> torch.Tensor:
        return _draw(logits_BV, temperature, torch.Generator().manual_seed(seed))

    shares = torch.bincount(drawn(1.0, 3), minlength=3) / len(logits_BV)
    torch.testing.assert_close(shares.double(), logits_BV[0].softmax(0), rtol=0, atol=0.015)
    assert torch.equal(drawn(1.0, 3), drawn(1.0, 3))
    assert not torch.equal(drawn(1.0, 3), drawn(1.0, 4))
    assert (drawn(0.0, 3) == 2).all()
