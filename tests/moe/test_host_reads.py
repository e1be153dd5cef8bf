"""Tests that a step with a given common length reads nothing from the device, so that a graph can capture it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eplb_lab.layer import layer as layer_module
from eplb_lab.layer.operators import reference
from tests.moe.operators.constraints import CHECKS
from tests.moe.option_rows import ROWS, call, case_of, expected, layer_of, step_of
from tests.moe.pairwise import Row
from tests.moe.simulated import SimulatedGroup, run_simulated

aten = torch.ops.aten
READING = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.equal.default,
}
_here = threading.local()


class HostReadError(AssertionError):
    """Raised when a value was read on the host."""


class NoHostReads(TorchDispatchMode):
    """Rejects every operation that would wait for the device if these tests ran on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexed_by_mask = func is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        unsized = func is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if func in READING or indexed_by_mask or unsized:
            raise HostReadError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    with NoHostReads():
        _here.watched = True
        try:
            yield
        finally:
            _here.watched = False


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exempt an operator or exchange from the check, because on a device it is a single call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        watched = getattr(_here, "watched", False)
        _here.watched = False
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return function(*args, **kwargs)
        finally:
            _here.watched = watched

    return call


@pytest.fixture(autouse=True)
def device_like(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(**{name: unwatched(getattr(reference, name)) for name in CHECKS})
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    monkeypatch.setattr("tests.moe.option_rows.reference", operators)
    monkeypatch.setattr(SimulatedGroup, "start_all_to_all", unwatched(SimulatedGroup.start_all_to_all))
    for name in ("tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _guarded_read(name, getattr(torch.Tensor, name)))


def _guarded_read(name: str, reading: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "watched", False):
            raise HostReadError(f"{name} reads a value on the host")
        return reading(tensor, *args, **kwargs)

    return call


def run(row: Row, *, length: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run one checked step on every rank, with or without a common length.

    Return the outputs and the expected outputs.
    """
    case = case_of(row, seed=0)

    def one_step(group: SimulatedGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layer = layer_of(case, row, group)
        step = step_of(case, row, group.rank)
        with no_host_reads():
            out_TH = call(layer, row, step, max(*case.tokens, 1) if length else None)
        return out_TH, expected(case, row, step)

    return run_simulated(case.ranks, one_step)


def captured() -> list[Row]:
    """Return one row for each of the layer's code paths, with varying other options."""
    chosen = {}
    for row in ROWS:
        way = row["dispatcher"], row["kind"], row["split"], row["mc2"]
        # All-to-all waits for its counts.
        if row["dispatcher"] != "all2allv":
            same = {"check_ids": False, "ranks": 4, "tokens": "different", "dtype": torch.float32}
            chosen.setdefault(way, row | same | {"weigh_on_input": False})
    return list(chosen.values())


CAPTURED = captured()


def test_nothing_is_read_on_the_host_if_the_length_is_known():
    seen = set()
    for row in CAPTURED:
        for out_TH, expected_TH in run(row, length=True):
            tolerance = 3e-2 if row["kind"] == "W8A8" else 2e-6
            assert (out_TH - expected_TH).norm() <= tolerance * expected_TH.norm(), row
        seen |= {row["dispatcher"], row["kind"], row["split"], row["entries"], row["mask"]}
        seen |= {f"{row['batches']} batches", f"{row['tensor_parallel']} share tokens"}
    assert {"mc2", "allgather", "moge", "grouped", "batched", "W8A8", "step", 5, "choices"} <= seen
    assert {"2 batches", "2 share tokens"} <= seen


@pytest.mark.parametrize("dispatcher", ["mc2", "allgather", "moge"])
def test_if_the_length_is_unknown_the_ranks_wait_for_one_exchange(dispatcher: str):
    row = next(row for row in CAPTURED if row["dispatcher"] == dispatcher)
    with pytest.raises(HostReadError, match="tolist"):
        run(row, length=False)


@pytest.mark.parametrize("length", [False, True])
@pytest.mark.parametrize("split", ["tables", "step"])
def test_all_to_all_waits_once_for_all_of_its_counts(
    split: str, length: bool, monkeypatch: pytest.MonkeyPatch
):
    read: list[int] = []
    refused = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        if getattr(_here, "watched", False):
            read.append(tensor.numel())
        return unwatched(refused)(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    row = next(row for row in ROWS if (row["dispatcher"], row["kind"]) == ("all2allv", "grouped"))
    same = {"check_ids": False, "ranks": 3, "tokens": "different", "weigh_on_input": False}
    run(row | same | {"batches": 1, "tensor_parallel": 1, "split": split}, length=length)
    # Two counts for each of three ranks: choices to send to it, and choices to receive from it.
    assert read == [6, 6, 6]


@pytest.mark.parametrize(
    "reading",
    [
        lambda tensor: tensor[tensor > 1],
        lambda tensor: int(tensor[0]),
        lambda tensor: tensor.tolist(),
        lambda tensor: bool((tensor > 0).any()),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor.repeat_interleave(tensor),
    ],
)
def test_the_guard_detects_that_the_host_reads_a_value(reading: Callable[[torch.Tensor], Any]):
    tensor = torch.arange(3)
    with no_host_reads(), pytest.raises(HostReadError):
        reading(tensor)
    reading(tensor)
