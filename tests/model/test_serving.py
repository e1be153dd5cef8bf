"""Requests are answered the same in any company, and what is asked follows the phases."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.model.small import small_model
from worker_agent.model.decode import Decoder
from worker_agent.model.sampling import Sampler
from worker_agent.model.serving import Server
from worker_agent.model.traffic import PHASES, Traffic, prompts_by_domain

LENGTH = 20


class OneQuestion(Traffic):
    """Asks the same in every row, for ever."""

    def request(self, step: int, row: int) -> tuple[str, bytes]:
        return "sql", b"SELECT"


def _served(rows: int, steps: int) -> np.ndarray:
    model, _ = small_model()
    server = Server(Decoder(model, rows), Sampler(0.0, 0), OneQuestion(steps, 0, 0), rows, LENGTH)
    return np.array([server.step()[0] for _ in range(steps)])


def test_a_request_reads_its_prompt_and_then_its_own_bytes() -> None:
    model, _ = small_model()
    decoder = Decoder(model, 1)
    fed, expected = list(b"SELECT"), []
    for place in range(LENGTH):
        logits_BV = decoder.step(torch.tensor([fed[place]]))
        if place >= 5:
            expected.append(int(logits_BV.argmax()))
            fed.append(expected[-1])
    answered = _served(1, 1 + LENGTH)[1:, 0]
    assert answered.tolist() == [-1] * 5 + expected


def test_rows_do_not_change_each_others_answers_and_end_at_different_steps() -> None:
    alone = _served(1, 3 * LENGTH)[1 : 1 + LENGTH, 0].tolist()
    together_TB = _served(4, 3 * LENGTH)
    first_ends = []
    for row_T in together_TB.T.tolist():
        begins = [step for step in range(1, LENGTH + 1) if row_T[step : step + LENGTH] == alone]
        assert len(begins) == 1
        first_ends += begins
    assert len(set(first_ends)) == 4


def test_what_is_in_flight_is_counted_by_domain() -> None:
    model, _ = small_model()
    traffic = OneQuestion(9, 0, 0)
    server = Server(Decoder(model, 3), Sampler(1.0, 0), traffic, 3, LENGTH)
    server.step()
    in_flight_D = server.in_flight()
    assert in_flight_D[traffic.domains.index("sql")] == in_flight_D.sum() == 3


def test_every_phase_asks_in_its_own_domains_and_all_domains_have_prompts() -> None:
    traffic = Traffic(400, rank=1, seed=3)
    asked: dict[int, Counter[str]] = {phase: Counter() for phase in range(len(PHASES))}
    for step in range(400):
        domain, prompt = traffic.request(step, row=step % 7)
        asked[traffic.phase(step)][domain] += 1
        assert prompt in prompts_by_domain()[domain]
    for phase, domains in enumerate(PHASES.values()):
        assert asked[phase].keys() == set(domains)
    assert sorted(domain for domains in PHASES.values() for domain in domains) == traffic.domains


def test_the_same_is_asked_whoever_asks_again_but_not_of_every_rank() -> None:
    def questions(rank: int, seed: int) -> list[tuple[str, bytes]]:
        return [Traffic(64, rank, seed).request(step, 0) for step in range(64)]

    assert questions(0, 1) == questions(0, 1)
    assert questions(0, 1) != questions(1, 1)
    assert questions(0, 1) != questions(0, 2)


def test_prompts_fit_well_into_a_request() -> None:
    for prompts in prompts_by_domain().values():
        assert all(0 < len(prompt) <= 48 for prompt in prompts)


def test_bytes_are_drawn_by_their_probability_and_by_the_seed_alone() -> None:
    logits_BV = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).expand(20_000, 3)
    drawn_B = Sampler(1.0, seed=3).draw(logits_BV)
    shares = torch.bincount(drawn_B, minlength=3) / len(drawn_B)
    torch.testing.assert_close(shares.double(), logits_BV[0].softmax(0), rtol=0, atol=0.015)
    assert torch.equal(drawn_B, Sampler(1.0, seed=3).draw(logits_BV))
    assert not torch.equal(drawn_B, Sampler(1.0, seed=4).draw(logits_BV))
    assert (Sampler(0.0, seed=3).draw(logits_BV) == 2).all()


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must not be negative, got -1"):
        Sampler(-1.0, 0)
