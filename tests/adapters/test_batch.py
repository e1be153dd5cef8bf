"""The step phase and token counts that the adapter derives from vLLM's schedule."""

import pytest

from eplb_core.heat.phase import StepPhase
from tests.adapters.vllm_fakes import scheduled
from worker_agent.adapters.batch import Batch, TokenShare, batch_of, share_of_rank, step_of


@pytest.mark.parametrize(
    ("counts", "drafts", "phase"),
    [
        ([1, 1, 1], {}, StepPhase.DECODE),
        ([512, 7], {}, StepPhase.PREFILL),
        ([1, 512], {}, StepPhase.MIXED),
        ([4, 1, 2], {0: 3, 2: 1}, StepPhase.DECODE),  # the requests have three, zero and one drafts
        ([4, 6], {0: 3}, StepPhase.MIXED),
        ([1], {}, StepPhase.DECODE),  # the last token of a prompt whose KV cache another instance filled
    ],
)
def test_a_request_is_prefill_if_it_computes_more_than_its_drafts_plus_one_token(counts, drafts, phase):
    assert batch_of(scheduled(counts, drafts)) == Batch(phase, sum(counts))


def test_a_schedule_without_tokens_has_no_batch():
    assert batch_of(scheduled([])) is None


@pytest.mark.parametrize("tokens", [0, 1, 3, 1000, 1001])
@pytest.mark.parametrize("divided", [True, False])
def test_the_ranks_of_a_data_parallel_rank_report_each_token_once(tokens, divided):
    shares = [TokenShare(rank, 4, divided).of(tokens) for rank in range(4)]
    assert sum(shares) == tokens
    assert max(shares) - min(shares) <= (1 if divided else tokens)


@pytest.mark.parametrize(
    ("batch", "share", "is_dummy", "reported"),
    [
        (Batch(StepPhase.MIXED, 9), TokenShare(0, 2, True), False, (StepPhase.MIXED, 5)),
        (Batch(StepPhase.MIXED, 9), TokenShare(1, 2, True), False, (StepPhase.MIXED, 4)),
        (Batch(StepPhase.PREFILL, 9), TokenShare(1, 2, False), False, (StepPhase.PREFILL, 0)),
        (Batch(StepPhase.PREFILL, 9), None, False, (StepPhase.PREFILL, None)),
        (Batch(StepPhase.PREFILL, 9), TokenShare(0, 2, True), True, (StepPhase.DUMMY, 0)),
        (None, TokenShare(0, 2, True), False, (StepPhase.DECODE, None)),
    ],
)
def test_a_step_is_reported_with_the_tokens_of_its_rank(batch, share, is_dummy, reported):
    assert step_of(batch, share, is_dummy=is_dummy) == reported


def test_the_ranks_of_a_data_parallel_rank_have_consecutive_numbers():
    assert [share_of_rank(rank, 2, shared=True).of(7) for rank in range(4)] == [7, 0, 7, 0]
    assert [share_of_rank(rank, 2, shared=False).of(7) for rank in range(4)] == [4, 3, 4, 3]
