"""Random tensors that are written in the engines' formats are read back exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace
from eplb_service.io.placement_file import read_placement
from tests.io.traces import by_expert

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=25)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="ENGINES' TENSORS ARE NOT TESTED: torch is not installed")


def placed(rng: np.random.Generator, layers: int, experts: int, ranks: int, slots: int) -> np.ndarray:
    """Return random placements, ``[L, R*S]``, in which each expert has at least one slot."""
    replicas = ranks * slots - experts
    rows = [
        rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, replicas)]))
        for _ in range(layers)
    ]
    return np.stack(rows)


def read(path: Path, **options: Any) -> np.ndarray:
    trace = open_trace(path, ReadAs(**options))
    return trace.heat(0, trace.steps)


@FEW
@given(seed=SEEDS, size=st.integers(1, 12), steps=st.integers(1, 30), dense=st.integers(0, 3))
def test_an_sglang_ring_buffer_is_read(
    torch: Any, seed: int, size: int, steps: int, dense: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    heat_TLE = rng.integers(0, 2**20, (steps, 2, 5))
    heat_TLE[:, :, 0] += 1
    places = np.sort(rng.permutation(2 + dense)[:2])
    buffer = np.zeros((size, 2 + dense, 5), dtype=np.int32)
    for step in range(steps):
        buffer[step % size, places] = heat_TLE[step]
    path = tmp_path_factory.mktemp("sglang") / "recorder.pt"
    torch.save({"rank": 0, "logical_count": torch.from_numpy(buffer)}, path)
    trace = open_trace(path)
    kept = heat_TLE[max(0, steps - size) :]
    np.testing.assert_array_equal(
        trace.heat(0, trace.steps), np.roll(kept, steps % size if steps > size else 0, axis=0)
    )
    assert trace.facts.layer_numbers == (tuple(places) if dense else ())
    assert ("ring buffer full" in trace.facts.origin) == (steps >= size > 1)


@FEW
@given(
    seed=SEEDS,
    steps=st.integers(1, 6),
    form=st.sampled_from(["pass", "window", "gathered"]),
    suffix=st.sampled_from([".npy", ".npz", ".pt"]),
)
def test_tokens_by_slot_of_vllm_and_vllm_ascend_are_read(
    torch: Any, seed: int, steps: int, form: str, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    phy2log_LP = placed(rng, 3, 6, 2, 5)
    slots_TLP = rng.integers(0, 2**20, (1 if form == "pass" else steps, 3, 10))
    written = {"pass": slots_TLP[0], "window": slots_TLP, "gathered": slots_TLP.reshape(-1, 3, 2, 5)}[form]
    name = {"pass": "expert_load_pass", "window": "expert_load_window", "gathered": "moe_load"}[form]
    path = tmp_path_factory.mktemp("slots") / f"{name}{suffix}"
    if suffix == ".npz":
        np.savez(path, **{name: written, "physical_to_logical_map": phy2log_LP})
        heat_TLE = read(path)
    elif suffix == ".npy":
        np.save(path, written)
        heat_TLE = read(path, phy2log=phy2log_LP)
    else:
        torch.save({name: torch.from_numpy(written), "phy2log": torch.from_numpy(phy2log_LP)}, path)
        heat_TLE = read(path)
    np.testing.assert_array_equal(heat_TLE, by_expert(slots_TLP, phy2log_LP, 6))


@FEW
@given(seed=SEEDS, layers=st.integers(1, 4), form=st.sampled_from(["tensor", "answer", "named"]))
def test_placements_of_deepseek_eplb_are_read(
    torch: Any, seed: int, layers: int, form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    linear_LRS = Placement.linear(layers, 6, 4, 2).phy2log_LRS
    phy2log_LRS = np.stack([rng.permutation(6)[layer_RS] for layer_RS in linear_LRS])
    phy2log_LP = torch.from_numpy(phy2log_LRS.reshape(layers, 8).astype(np.int64))
    answer = phy2log_LP, torch.zeros(layers, 6, 2), torch.ones(layers, 6)
    named = dict(zip(("phy2log", "log2phy", "logcnt"), answer, strict=True))
    path = tmp_path_factory.mktemp("deepseek") / "placement.pt"
    torch.save({"tensor": phy2log_LP, "answer": answer, "named": named}[form], path)
    np.testing.assert_array_equal(read_placement(path, experts=6, ranks=4).phy2log_LRS, phy2log_LRS)
