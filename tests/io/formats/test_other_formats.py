"""Heat of TensorRT-LLM, of OpenEvolve's benchmark and in parquet is read as it was written, or refused in one line."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.atomic_write import OutputError
from eplb_service.heat.window import HeatError
from eplb_service.io.containers.safetensors_file import read_safetensors
from eplb_service.io.copy_trace import Cut, check_trace_output, copy_trace
from eplb_service.io.open_trace import open_trace, read_heat
from eplb_service.io.trace import ArrayTrace


def safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    """As the library writes it."""
    header, body = {}, b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, dtype="<i8").tobytes()
        header[name] = {
            "dtype": "I64",
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + body


def statistics(folder: Path, heat_RTLE: np.ndarray, first: int = 100, layers: tuple[int, ...] = ()) -> Path:
    ranks, steps, count, experts = heat_RTLE.shape
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": 2}))
    for rank in range(ranks):
        arrays = {
            f"{first + step}_{(layers or range(count))[layer]}": heat_RTLE[rank, step, layer]
            for step in range(steps)
            for layer in range(count)
        }
        (folder / f"rank{rank}.safetensors").write_bytes(safetensors(arrays))
    return folder


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 12),
    layers=st.integers(1, 12),
)
def test_statistics_of_tensorrt_llm_are_the_sum_over_ranks(
    seed: int, ranks: int, steps: int, layers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    heat_RTLE = np.random.default_rng(seed).integers(0, 2**40, (ranks, steps, layers, 4))
    folder = statistics(tmp_path_factory.mktemp("trt") / "statistics", heat_RTLE)
    trace = open_trace(folder)
    np.testing.assert_array_equal(trace.heat(0, trace.steps), heat_RTLE.sum(axis=0))
    assert (trace.facts.ranks, trace.facts.top_k, trace.facts.layer_numbers) == (ranks, 2, ())


def test_numbers_of_layers_are_the_model_s(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "s", np.ones((1, 2, 3, 4), dtype=np.int64), layers=(3, 4, 10))
    assert open_trace(folder).facts.layer_numbers == (3, 4, 10)


def test_what_is_wrong_with_statistics(tmp_path: Path) -> None:
    heat_RTLE = np.ones((3, 2, 2, 4), dtype=np.int64)
    folder = statistics(tmp_path / "s", heat_RTLE)
    (folder / "rank1.safetensors").unlink()
    with pytest.raises(HeatError, match=r"s: lacks rank1.safetensors"):
        open_trace(folder)
    statistics(folder, heat_RTLE)
    (folder / "rank2.safetensors").write_bytes(safetensors({"100_0": np.ones(5)}))
    with pytest.raises(
        HeatError, match=r"rank2.safetensors: 100_0 holds int64 \[5\]; expected a count for each of 4"
    ):
        open_trace(folder)
    (folder / "rank2.safetensors").write_bytes(safetensors({"layer": np.ones(4)}))
    with pytest.raises(HeatError, match="expected names such as 100_3"):
        open_trace(folder)
    (folder / "rank2.safetensors").write_bytes(safetensors({"105_0": np.ones(4)}))
    with pytest.raises(HeatError, match="iteration 105 lacks layer 1, which others have"):
        open_trace(folder)
    (folder / "meta_info.json").write_text("{}")
    with pytest.raises(HeatError, match="names no num_experts"):
        open_trace(folder)


@given(damage=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 300))
def test_damaged_safetensors_are_refused_or_read(
    damage: int, value: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(safetensors({"100_0": np.arange(4), "100_1": np.arange(4)}))
    content[damage % len(content)] = value
    path = tmp_path_factory.mktemp("damaged") / "rank0.safetensors"
    path.write_bytes(bytes(content[: len(content) - cut % len(content)]))
    with contextlib.suppress(HeatError):
        for array in read_safetensors(path).values():
            assert array.size <= 8


def test_a_header_that_lies_about_its_size_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank0.safetensors"
    entry = {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]}
    text = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(HeatError, match="is not where the header says"):
        read_safetensors(path)


def test_a_history_of_loads(tmp_path: Path) -> None:
    heat_TLE = np.arange(24).reshape(2, 3, 4)
    path = tmp_path / "expert-load.json"
    entries = [
        {"step": step, "logical_expert_load": heat_LE.tolist()} for step, heat_LE in enumerate(heat_TLE)
    ]
    path.write_text(json.dumps({"load_history": entries}))
    np.testing.assert_array_equal(read_heat(path), heat_TLE)
    entries[1]["logical_expert_load"] = [[1, 2]]
    path.write_text(json.dumps({"load_history": entries}))
    with pytest.raises(HeatError, match=r"entry 1 of load_history is \[1, 2\], the first \[3, 4\]"):
        open_trace(path)
    path.write_text(json.dumps({"load_history": [{"loads": []}]}))
    with pytest.raises(HeatError, match="entry 0 of load_history holds no logical_expert_load"):
        open_trace(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="PARQUET IS NOT TESTED: no pyarrow here")
    from pyarrow import parquet

    heat_TLE = np.random.default_rng(1).poisson(2.0, (5, 3, 4))
    heat_TLE[-1, -1, -1] = 7
    step_K, layer_K, expert_K = np.nonzero(heat_TLE)
    columns = {"step": step_K + 10, "layer": layer_K, "expert": expert_K, "tokens": heat_TLE[heat_TLE > 0]}
    path = tmp_path / "heat.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    np.testing.assert_array_equal(read_heat(path), heat_TLE)
    parquet.write_table(pyarrow.table({"step": [1]}), path)
    with pytest.raises(HeatError, match="has no column layer; expected step, layer, expert, tokens"):
        open_trace(path)
    parquet.write_table(pyarrow.table({**columns, "layer": layer_K - 0.5}), path)
    with pytest.raises(HeatError, match=r"row 1 holds .* expected step, layer, expert and tokens from 0 on"):
        open_trace(path)
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(HeatError, match="is damaged"):
        open_trace(path)


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 150), fractions=st.booleans())
@settings(max_examples=20)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_are_read_back_as_they_were_written(
    suffix: str, seed: int, steps: int, fractions: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="PARQUET IS NOT TESTED: no pyarrow here")
    heat_TLE = np.random.default_rng(seed).poisson(0.3, (steps, 2, 5))
    if fractions:
        heat_TLE = heat_TLE * 0.1
    path = tmp_path_factory.mktemp("table") / f"heat{suffix}"
    copy_trace(ArrayTrace(heat_TLE), path)
    read = read_heat(path)
    np.testing.assert_array_equal(read, heat_TLE)
    assert read.dtype == (heat_TLE.dtype if heat_TLE.any() else np.int64)


def test_a_slice_of_a_table_begins_at_its_own_first_step(tmp_path: Path) -> None:
    heat_TLE = np.random.default_rng(1).poisson(0.1, (200, 3, 4))
    copy_trace(ArrayTrace(heat_TLE), tmp_path / "part.csv", Cut(70, 190, 1, 3))
    np.testing.assert_array_equal(read_heat(tmp_path / "part.csv"), heat_TLE[70:190, 1:3])


def test_parquet_without_pyarrow_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        OutputError, match=r"heat.parquet: is parquet, for which pyarrow is needed.*\(import of"
    ):
        check_trace_output(tmp_path / "heat.parquet")
    check_trace_output(tmp_path / "heat.csv")
