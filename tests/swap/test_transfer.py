"""Transfers: rounds of moves, the byte budget, staging memory, and commits of staged experts."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.swap.carried import PlainLayer, order
from tests.swap.placed import INSTALLED, plan_of
from worker_agent.settings import AgentSettings
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.driver import SwitchDriver
from worker_agent.swap.machine import Commit
from worker_agent.swap.staging import Staging
from worker_agent.swap.transfer import ByteBudget, StagedLayer, TransferResult, TransferWorker, _rounds


def test_a_draw_waits_until_the_budget_is_positive() -> None:
    budget = ByteBudget(100)
    assert not budget.draw(10, timeout=0.01)
    budget.refill()
    assert budget.draw(250, timeout=0.01)
    budget.refill()
    assert not budget.draw(1, timeout=0.01)
    refills = threading.Thread(target=lambda: (time.sleep(0.05), budget.refill(), budget.refill()))
    refills.start()
    assert budget.draw(1, timeout=5)
    refills.join()
    assert ByteBudget(None).draw(1 << 40, timeout=0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1]), max_size=40
    )
)
def test_rounds_contain_every_move_once_and_a_rank_sends_and_receives_at_most_once_per_round(
    pairs: list[tuple[int, int]],
) -> None:
    moves_M5 = np.array([(source, 0, target, 0, 0) for source, target in pairs], dtype=np.int32).reshape(
        -1, 5
    )
    planned = _rounds(moves_M5)
    assert sorted(move for batch in planned for move in batch) == list(range(len(pairs)))
    for batch in planned:
        assert len({pairs[move][0] for move in batch}) == len(batch)
        assert len({pairs[move][1] for move in batch}) == len(batch)


def test_staging_is_reused_while_it_fits_and_freed_when_dropped() -> None:
    staging = Staging()
    assert staging.nbytes == 0
    weights = [torch.zeros(4, 3, 2), torch.zeros(4, 5)]
    (first,) = staging.reserve([weights], [3])
    (smaller,) = staging.reserve([weights], [2])
    assert staging.nbytes == 3 * 4 * (6 + 5), (
        "expected memory for three float32 experts, although only two are reserved now"
    )
    assert [buffer.data_ptr() for buffer in first] == [buffer.data_ptr() for buffer in smaller]
    assert [tuple(buffer.shape) for buffer in smaller] == [(2, 3, 2), (2, 5)]
    staging.drop()
    assert staging.nbytes == 0
    (fresh,) = staging.reserve([weights], [2])
    assert all(new.data_ptr() != old.data_ptr() for new, old in zip(fresh, first, strict=True))


def test_a_list_of_experts_is_staged_in_separate_tensors() -> None:
    staging = Staging()
    weights = [[torch.zeros(3, 2) for _ in range(4)], torch.zeros(4, 5)]
    ((rows, _),) = staging.reserve([weights], [2])
    assert [tuple(row.shape) for row in rows] == [(3, 2), (3, 2)]
    assert staging.nbytes == 2 * 4 * (6 + 5)
    assert {row.storage_offset() for row in rows} == {0}
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 2
    # Stacked tensors and lists of experts do not share buffers.
    ((stacked, _),) = staging.reserve([[torch.zeros(4, 3, 2), torch.zeros(4, 5)]], [2])
    assert isinstance(stacked, torch.Tensor)
    assert [len(buffer) for buffer in staging.reserve([weights], [0])[0]] == [0, 0]


@pytest.mark.parametrize(
    "result",
    [
        None,
        TransferResult(2),
        TransferResult(4),
        TransferResult(3),
        TransferResult(3, (StagedLayer(0, [], []),)),
    ],
)
def test_a_commit_without_its_staged_weights_is_fatal(result: TransferResult | None) -> None:
    driver: Any = object.__new__(SwitchDriver)
    driver._staged = result
    update = plan_of(0, 0).layers[1]
    after = INSTALLED.with_layer(1, update.phy2log_RS, update.log2phy_E)
    with pytest.raises(
        FatalSwitchError, match=r"a vote committed layers \[1\], but their weights are not staged"
    ):
        driver._commit(Commit(9, 3, (update,), INSTALLED, (after,)))


def test_staging_of_a_failed_transfer_is_dropped() -> None:
    """A device may still write to that memory, which would overwrite the next transfer's experts."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a link broke")

    lane = SimpleNamespace(exchange=fail)
    lanes: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, lane=lambda _: lane, retire=lambda: None)
    worker = TransferWorker(lanes, AgentSettings(), ByteBudget(None))
    worker.start(order(1, (1, 0, 0, 1, 3)), [PlainLayer(0)])
    while (result := worker.poll()) is None:
        time.sleep(0.001)
    assert result.error == "transfer of layer 0 failed: a link broke"
    assert worker.staging.nbytes == 0
    worker.close()


def _idle_worker() -> TransferWorker:
    lanes: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, retire=lambda: None)
    return TransferWorker(lanes, AgentSettings(), ByteBudget(None))


def test_transfers_use_the_staging_reserved_at_startup() -> None:
    worker = _idle_worker()
    weights = [[torch.zeros(3, 2) for _ in range(4)], torch.zeros(4, 5)]
    worker.reserve(weights, rows=3)
    assert worker.staging.nbytes == 3 * 44
    ((rows, _),) = worker.staging.reserve([weights], [3])
    # Two layers in one transfer use separate rows of the reserved memory.
    (first, _), (second, _) = worker.staging.reserve([weights, weights], [1, 2])
    assert [row.data_ptr() for row in (*first, *second)] == [row.data_ptr() for row in rows]
    assert worker.staging.nbytes == 3 * 44
    worker.close()


def test_layers_of_two_kinds_are_staged_side_by_side() -> None:
    staging = Staging()
    wide = [torch.zeros(4, 3, 2)]
    narrow = [torch.zeros(4, 5)]
    buffers = staging.reserve([wide, narrow, wide], [2, 1, 1])
    assert [tuple(buffer.shape) for (buffer,) in buffers] == [(2, 3, 2), (1, 5), (1, 3, 2)]
    pointers = {row.data_ptr() for (buffer,) in buffers for row in buffer}
    assert len(pointers) == 4
    assert staging.nbytes == 4 * (3 * 6 + 5)
    # Buffers for other kinds of layers are freed before more memory is allocated.
    staging.reserve([narrow], [2])
    assert staging.nbytes == 4 * 10


def test_startup_fails_if_the_device_has_no_memory_for_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("out of memory")

    worker = _idle_worker()
    monkeypatch.setattr(worker.staging, "reserve", fail)
    with pytest.raises(
        RuntimeError, match=r"cannot reserve staging for 4 incoming experts: .*EPLB_AGENT_STAGING_MIB"
    ):
        worker.reserve([torch.zeros(4, 5)], rows=4)
    worker.close()


def test_a_pause_does_not_grow_with_the_pauses_of_other_ranks() -> None:
    """Otherwise, each rank in a ring would pause three times as long as it had waited for the pauses of its peers."""
    budget = ByteBudget(None, share=0.25)
    began = time.monotonic()
    budget.rest(0.01, 1000, longest=30.0)
    for _ in range(3):
        budget.rest(30.0, 1000, longest=30.0)
    seconds = time.monotonic() - began
    assert 0.03 + 3 * 0.06 <= seconds < 10
