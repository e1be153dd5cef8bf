"""Log lines and trace files that one or several ranks write without a service."""

import logging

import numpy as np
import pytest
import torch.distributed as dist

from eplb_core.wire.heat import HeatReport
from eplb_service.io.open_trace import open_trace
from tests.agent import live
from worker_agent.observe import local
from worker_agent.observe.balance import IntervalBalance, Steps
from worker_agent.observe.local import LocalReports

SHARES = np.eye(2, dtype=np.float32)[[0, 0, 1, 1]][None]
"""Two ranks with two experts each, in one layer."""


def report(first_step, heat_TE, tokens=None, micros=1000):
    steps = len(heat_TE)
    return HeatReport(
        first_step,
        (0,),
        None,
        np.full(steps, 2, dtype=np.uint8),
        np.array(heat_TE, dtype=np.int32)[:, None],
        None if tokens is None else np.array(tokens, dtype=np.int64),
        micros_T=np.full(steps, micros, dtype=np.int64),
    )


def test_a_line_names_the_hottest_rank_and_layer():
    balance = IntervalBalance(interval=4)
    shares_LER = np.concatenate([SHARES, SHARES])
    heat_TLE = np.array([[[1, 1, 1, 1], [0, 0, 3, 1]], [[2, 2, 0, 0], [0, 0, 0, 0]]], dtype=np.int32)
    tokens_T, micros_T = np.array([4, -1]), np.array([0, 1500])
    balance.add(Steps(0, heat_TLE, tokens_T, micros_T), shares_LER)
    assert not balance.is_over
    balance.add(Steps(2, heat_TLE, tokens_T, np.array([2500, 3500])), shares_LER)
    assert balance.is_over
    # Layer 0 has PAR 1 and 2, layer 1 has PAR 2 and then no tokens. Each layer of a step has the same weight.
    assert balance.line() == (
        "imbalance 1.750 (PAR) over 4 forward passes; hottest rank 0 (1.00 times the mean), layer 1 (PAR 2.000); "
        "8 tokens, 2.5 ms a step"
    )
    balance.add(Steps(4, np.zeros_like(heat_TLE), np.array([0, 0]), np.array([0, 0])), shares_LER)
    assert balance.line() == "no tokens in 2 forward passes"


def test_one_rank_writes_a_line_per_interval_and_the_trace(tmp_path, caplog):
    caplog.set_level(logging.INFO, "eplb.agent")
    path = tmp_path / "heat.npz"
    reports = LocalReports(live.settings(log_interval_steps=4, trace=path), 0, [0])
    for number in range(5):
        reports.put(report(2 * number, [[3, 0, 1, 0], [1, 1, 1, 1]], [4, 4]), SHARES)
    reports.close(60)
    assert [line.partition(" over ")[0] for line in caplog.messages] == ["imbalance 1.250 (PAR)"] * 2
    assert "16 tokens, 1.0 ms a step" in caplog.messages[0]
    assert open_trace(path).steps == 10


def test_the_counts_of_ranks_with_different_tokens_are_summed(tmp_path, caplog):
    caplog.set_level(logging.INFO, "eplb.agent")
    store = dist.HashStore()
    settings = live.settings(log_interval_steps=2, trace=tmp_path / "heat.npz")
    ranks = [LocalReports(settings, rank, [0, 2], store, "group") for rank in range(3)]
    ranks[2].put(report(0, [[0, 0, 2, 0], [0, 0, 1, 1]], [2, 2]), SHARES)
    ranks[1].put(report(0, [[9, 9, 9, 9]] * 2, [9, 9]), SHARES)
    ranks[0].put(report(0, [[2, 0, 0, 0], [2, 0, 0, 0]], [2, 2]), SHARES)
    for rank in ranks:
        rank.close(60)
    (line,) = caplog.messages
    assert line.startswith("imbalance 1.000 (PAR) over 2 forward passes")
    assert "8 tokens" in line
    assert open_trace(tmp_path / "heat.npz").heat(0, 2)[0, 0].tolist() == [2, 0, 2, 0]
    assert store.num_keys() == 0


def test_steps_that_lack_a_ranks_report_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "_PEER_SECONDS", 0.05)
    store = dist.HashStore()
    settings = live.settings(trace=tmp_path / "heat.npz")
    first, second = (LocalReports(settings, rank, [0, 1], store, "group") for rank in range(2))
    first.put(report(0, [[1, 1, 1, 1]]), SHARES)
    second.put(report(1, [[1, 1, 1, 1]]), SHARES)
    second.close(60)
    first.put(report(1, [[1, 1, 1, 1]]), SHARES)
    first.close(60)
    assert open_trace(tmp_path / "heat.npz").heat(0, 1).tolist() == [[[2, 2, 2, 2]]]


def test_unread_reports_do_not_fill_the_store(monkeypatch):
    monkeypatch.setattr(local, "_MAX_REPORTS", 3)
    store = dist.HashStore()
    before = store.num_keys()
    sender = LocalReports(live.settings(), 1, [0, 1], store, "group")
    for step in range(8):
        sender._process(report(step, [[1, 1, 1, 1]]), SHARES)
    sender.close(60)
    assert store.num_keys() - before == 3
    assert store.check(["group/1/7"])


def test_an_invalid_trace_path_is_logged_once_and_does_not_stop_the_log_lines(tmp_path, caplog):
    caplog.set_level(logging.INFO, "eplb.agent")
    settings = live.settings(log_interval_steps=1, trace=tmp_path / "none" / "heat.npz")
    reports = LocalReports(settings, 0, [0])
    reports.put(report(0, [[1, 1, 1, 1]]), SHARES)
    reports.close(60)
    error, line = caplog.messages
    assert error.startswith("EPLB_AGENT_TRACE: ")
    assert error.endswith("create it first. No trace will be written")
    assert line.startswith("imbalance 1.000")


def test_a_full_disk_does_not_stop_the_log_lines(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "eplb.agent")

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", fail)
    reports = LocalReports(live.settings(log_interval_steps=1, trace=tmp_path / "heat.npz"), 0, [0])
    for step in range(2):
        reports.put(report(step, [[1, 1, 1, 1]]), SHARES)
    reports.close(60)
    assert sum("imbalance 1.000" in message for message in caplog.messages) == 2
    assert any("could not be written: no space left" in message for message in caplog.messages)


def test_a_repeated_error_while_reporting_is_logged_once(caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(IntervalBalance, "add", fail)
    reports = LocalReports(live.settings(), 0, [0])
    for step in range(3):
        reports.put(report(step, [[1, 1, 1, 1]]), SHARES)
    reports.close(60)
    assert len(caplog.messages) == 1
    assert "the engine is not affected" in caplog.messages[0]


@pytest.mark.parametrize("rank", [1, 3])
def test_ranks_that_do_not_count_have_no_thread(rank):
    reports = LocalReports(live.settings(), rank, [0, 2], dist.HashStore(), "group")
    assert reports._thread is None
    reports.put(report(0, [[1, 1, 1, 1]]), SHARES)
    reports.close(1)
