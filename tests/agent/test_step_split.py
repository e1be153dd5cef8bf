"""Tests of the per-step split in engines: when it is enabled, padding, agreement among ranks, and new placements."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent import queued_device
from tests.ranks import run_ranks
from tests.solver.slow.stepwise import optimum
from worker_agent import step_split as module
from worker_agent.step_split import StepSplit, choose_split, is_requested, ranks_agree

PLACED_RS = np.array([[0, 1, 2, 0], [3, 4, 5, 1], [6, 7, 0, 2]])
EXPERTS = 8
SKEWED_TK = torch.tensor([[0, expert] for expert in (1, 2, 1, 3, 4, 1, 2, 5, 6, 7, 1, 2)] * 4)


def loads_of(physical_TK, placed_RS):
    """Return the number of choices that each rank receives."""
    slots_P = torch.bincount(physical_TK.reshape(-1), minlength=placed_RS.size)
    return slots_P.reshape(placed_RS.shape).sum(dim=1).tolist()


def check_experts(physical_TK, ids_TK, placed_RS):
    """Check that each choice goes to a replica of its own expert."""
    assert torch.from_numpy(placed_RS.reshape(-1))[physical_TK.long()].tolist() == ids_TK.tolist()


@pytest.mark.parametrize(
    ("setting", "facts", "least", "exchanges"),
    [
        ("off", {}, None, False),
        ("auto", {}, None, False),
        ("on", {}, 1, False),
        (4096, {}, 4096, False),
        ("on", {"device_type": "npu"}, None, False),
        ("on", {"obstacle": "its kernels route"}, None, False),
        ("on", {"sees_all": False}, 1, True),
        ("on", {"sees_all": False, "no_exchange": "its ranks skip layers"}, None, False),
        (4096, {"sees_all": False}, None, False),
    ],
)
def test_the_setting_and_the_engine_decide_whether_tokens_are_split(setting, facts, least, exchanges):
    choice = choose_split(setting, **({"sees_all": True, "device_type": "cuda"} | facts))
    assert (choice.least_tokens, choice.exchanges) == (least, exchanges)
    assert choice.is_on == (least is not None)
    assert not choice.is_on or is_requested(setting)
    assert str(choice).startswith("step split: off; " if least is None else "step split: on for ")
    assert all(
        reason in str(choice) for reason in (facts.get("obstacle"), facts.get("no_exchange")) if reason
    )


def test_a_split_of_shared_tokens_is_optimal():
    physical_TK, counted_TK = StepSplit(PLACED_RS, EXPERTS, "cpu").physical(SKEWED_TK)
    check_experts(physical_TK, SKEWED_TK, PLACED_RS)
    assert counted_TK.all()
    counts_E = np.bincount(SKEWED_TK.reshape(-1), minlength=EXPERTS)
    assert max(loads_of(physical_TK, PLACED_RS)) <= optimum(PLACED_RS, counts_E.astype(float)) + 1


def test_padding_does_not_affect_the_split_and_goes_to_replicas_of_its_experts():
    split = StepSplit(PLACED_RS, EXPERTS, "cpu")
    alone_TK, _ = split.physical(SKEWED_TK)
    garbage_TK = torch.tensor([[0, 5]] * 100)
    padded_TK = torch.cat([SKEWED_TK, garbage_TK])
    physical_TK, counted_TK = split.physical(padded_TK, torch.tensor(len(SKEWED_TK)))
    assert physical_TK[: len(SKEWED_TK)].tolist() == alone_TK.tolist()
    assert physical_TK[len(SKEWED_TK) :].tolist() == [[0, 6]] * 100
    assert counted_TK.sum() == SKEWED_TK.numel()
    everywhere_TK, _ = split.physical(padded_TK)
    assert everywhere_TK[: len(SKEWED_TK)].tolist() != alone_TK.tolist()


def test_ranks_with_different_padding_split_the_real_rows_in_the_same_way():
    split = StepSplit(PLACED_RS, EXPERTS, "cpu")
    real = torch.tensor(len(SKEWED_TK))
    here_TK, there_TK = (
        split.physical(torch.cat([SKEWED_TK, torch.full((9, 2), expert)]), real)[0] for expert in (0, 4)
    )
    assert here_TK[: len(SKEWED_TK)].tolist() == there_TK[: len(SKEWED_TK)].tolist()


def test_choices_outside_the_expert_range_are_not_mapped():
    ids_TK = torch.tensor([[0, -1], [1, EXPERTS], [0, 2]])
    physical_TK, counted_TK = StepSplit(PLACED_RS, EXPERTS, "cpu").physical(ids_TK)
    assert (physical_TK == -1).tolist() == [[False, True], [False, True], [False, False]]
    assert counted_TK.tolist() == [[True, False], [True, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_number_of_tokens_decides_which_passes_are_split(dtype):
    split = StepSplit(PLACED_RS, EXPERTS, "cpu", least_tokens=16)
    assert [split.applies(tokens) for tokens in (0, 15, 16, 4096)] == [False, False, True, True]
    assert not StepSplit(PLACED_RS, EXPERTS, "cpu").applies(0)
    physical_TK, _ = split.physical(SKEWED_TK.to(dtype))
    check_experts(physical_TK, SKEWED_TK, PLACED_RS)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_split_is_near_the_optimum_for_any_placement_of_all_experts(data):
    """Engines' own balancers may place several replicas of an expert on one rank."""
    ranks = data.draw(st.integers(1, 4), label="ranks")
    slots = data.draw(st.integers(1, 4), label="slots")
    experts = data.draw(st.integers(1, ranks * slots), label="experts")
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    others = draw.integers(0, experts, ranks * slots - experts)
    placed_RS = draw.permutation(np.concatenate([np.arange(experts), others])).reshape(ranks, slots)
    counts_E = draw.poisson(20 * np.exp(draw.normal(0, 1, experts)))
    ids_TK = torch.from_numpy(draw.permutation(np.repeat(np.arange(experts), counts_E)))[:, None]
    split = StepSplit(np.tile(np.arange(ranks * slots) % experts, 1).reshape(ranks, slots), experts, "cpu")
    split.install(placed_RS)
    physical_TK, _ = split.physical(ids_TK)
    check_experts(physical_TK, ids_TK, placed_RS)
    assert max(loads_of(physical_TK, placed_RS)) <= highest_bound(placed_RS, counts_E) + 1 + 1e-6


def highest_bound(placed_RS, counts_E):
    """Return the optimum: over all sets of ranks, the highest mean load from experts that only those ranks hold."""
    ranks = len(placed_RS)
    holders = [
        {rank for rank in range(ranks) if expert in placed_RS[rank]} for expert in range(len(counts_E))
    ]
    bounds = []
    for number in range(1, 1 << ranks):
        group = {rank for rank in range(ranks) if number >> rank & 1}
        inside = sum(count for count, held in zip(counts_E, holders, strict=True) if held <= group)
        bounds.append(inside / len(group))
    return max(bounds)


def test_a_new_placement_is_installed_in_place_and_can_be_written_again():
    other_RS = PLACED_RS[::-1].copy()
    split = StepSplit(PLACED_RS, EXPERTS, "cpu")
    tensors = {
        id(owner): {name: value for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}
        for owner in (split, split._split)
    }
    split.install(other_RS.reshape(-1))
    expected_TK, _ = StepSplit(other_RS, EXPERTS, "cpu").physical(SKEWED_TK)
    assert split.physical(SKEWED_TK)[0].tolist() == expected_TK.tolist()
    for named in tensors.values():
        for tensor in named.values():
            # An engine may discard its memory when it sleeps.
            tensor.zero_()
    split.install(other_RS)
    assert split.physical(SKEWED_TK)[0].tolist() != expected_TK.tolist()
    split.write_again()
    assert split.physical(SKEWED_TK)[0].tolist() == expected_TK.tolist()


class Exchange:
    """Exchange of counts among gloo ranks."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_gather(self, rows_TX):
        gathered = [torch.empty_like(rows_TX) for _ in range(self.size)]
        dist.all_gather(gathered, rows_TX)
        return torch.cat(gathered)


def split_of_own_tokens():
    """Return this rank's choices and their physical experts. The ranks have 74, 37 and 0 tokens."""
    rank = dist.get_rank()
    draw = np.random.default_rng(rank)
    ids_TK = torch.from_numpy(draw.zipf(1.4, (37 * (2 - rank), 2)) % EXPERTS)
    split = StepSplit(PLACED_RS, EXPERTS, "cpu", group=Exchange())
    assert split.applies(0)
    physical_TK, _ = split.physical(ids_TK)
    return ids_TK.tolist(), physical_TK.tolist()


def test_ranks_with_different_tokens_exchange_their_counts():
    results = run_ranks(3, split_of_own_tokens)
    ids_TK, physical_TK = (
        torch.tensor([row for part in parts for row in part]) for parts in zip(*results, strict=True)
    )
    check_experts(physical_TK, ids_TK, PLACED_RS)
    counts_E = np.bincount(ids_TK.reshape(-1), minlength=EXPERTS)
    assert max(loads_of(physical_TK, PLACED_RS)) <= optimum(PLACED_RS, counts_E.astype(float)) + 1


def agreement(broken):
    split = StepSplit(PLACED_RS, EXPERTS, "cpu")
    if broken and dist.get_rank() == 1:
        split.install(PLACED_RS[::-1])
    return ranks_agree(split, EXPERTS, torch.device("cpu"), dist.group.WORLD)


@pytest.mark.parametrize("broken", [False, True])
def test_ranks_detect_at_startup_whether_they_split_differently(broken):
    assert run_ranks(3, agreement, broken) == [not broken] * 3


@pytest.mark.parametrize("experts", [1, 3, 8, 60, 256])
def test_the_probe_chooses_every_expert(experts):
    counts_E = torch.bincount(module.probe(experts).reshape(-1), minlength=experts)
    assert (counts_E > 0).all()
    assert experts < 8 or counts_E.max() >= 1.5 * counts_E.min()


def test_the_split_uses_pytorch_operators_if_its_kernels_do_not_work(monkeypatch, caplog):
    """Triton is not installed here, so even a device type with kernels uses the PyTorch operators."""
    monkeypatch.setattr(module, "KERNEL_DEVICES", ["cpu"])
    for reason, physical in (
        ("Triton is not installed", None),
        ("KeyError: 'ptx'", lambda *_: {}["ptx"]),
        ("the kernels do not give the same results", lambda _, ids_TK, real_rows: torch.zeros_like(ids_TK)),
    ):
        caplog.clear()
        if physical is not None:
            monkeypatch.setattr(module.SplitKernels, "reason_against", lambda *_: None)
            monkeypatch.setattr(module.SplitKernels, "physical", physical)
        split = StepSplit(PLACED_RS, EXPERTS, "cpu")
        assert not split.uses_kernels
        assert reason in caplog.text
        check_experts(split.physical(SKEWED_TK)[0], SKEWED_TK, PLACED_RS)


def install_on_a_busy_device():
    """Install a placement. Return three flags: the host waited, the split is right, and the first slots are right."""
    device = queued_device.install()
    split = StepSplit(PLACED_RS, EXPERTS, torch.device("queued"))
    done = threading.Event()
    device.put(done.wait)
    threading.Timer(5, done.set).start()
    split.install(PLACED_RS[::-1])
    waited = done.is_set()
    done.set()
    device.wait()
    expected = StepSplit(PLACED_RS[::-1], EXPERTS, "cpu")
    names = [name for name, value in vars(expected._split).items() if isinstance(value, torch.Tensor)]
    same = [torch.equal(getattr(split._split, name).held, getattr(expected._split, name)) for name in names]
    return waited, all(same), torch.equal(split._first_E.held, expected._first_E)


def test_installing_a_placement_does_not_wait_for_the_device():
    assert run_ranks(1, install_on_a_busy_device) == [(False, True, True)]
