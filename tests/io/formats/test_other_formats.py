"""Tests of TensorRT-LLM statistics and of tables: correct heat, or a one-line error."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.atomic_write import OutputError
from eplb_core.heat.window import HeatError
from eplb_service.io.copy_trace import check_trace_output, copy_trace
from eplb_service.io.open_trace import open_trace, read_heat
from eplb_service.io.trace import ArrayTrace


def safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    library = pytest.importorskip(
        "safetensors.numpy", reason="TENSORRT-LLM IS NOT TESTED: safetensors is not installed"
    )
    content: bytes = library.save({name: array.astype(np.int64) for name, array in arrays.items()})
    return content


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
def test_tensorrt_llm_statistics_are_summed_over_ranks(
    seed: int, ranks: int, steps: int, layers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    heat_RTLE = np.random.default_rng(seed).integers(0, 2**40, (ranks, steps, layers, 4))
    folder = statistics(tmp_path_factory.mktemp("trt") / "statistics", heat_RTLE)
    trace = open_trace(folder)
    np.testing.assert_array_equal(trace.heat(0, trace.steps), heat_RTLE.sum(axis=0))
    assert (trace.facts.ranks, trace.facts.top_k, trace.facts.layer_numbers) == (ranks, 2, ())


def test_layers_keep_the_layer_numbers_of_the_model(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "s", np.ones((1, 2, 3, 4), dtype=np.int64), layers=(3, 4, 10))
    assert open_trace(folder).facts.layer_numbers == (3, 4, 10)


def test_invalid_statistics_are_rejected(tmp_path: Path) -> None:
    heat_RTLE = np.ones((3, 2, 2, 4), dtype=np.int64)
    folder = statistics(tmp_path / "s", heat_RTLE)
    (folder / "rank1.safetensors").unlink()
    with pytest.raises(HeatError, match=r"s: has no rank1.safetensors"):
        open_trace(folder)
    statistics(folder, heat_RTLE)
    (folder / "rank2.safetensors").write_bytes(safetensors({"100_0": np.ones(5)}))
    with pytest.raises(
        HeatError,
        match=r"rank2.safetensors: 100_0 holds int64 of shape \[5\]; expected names such as 100_3 .* for 4 experts",
    ):
        open_trace(folder)
    (folder / "rank2.safetensors").write_bytes(safetensors({"layer": np.ones(4)}))
    with pytest.raises(HeatError, match="expected names such as 100_3"):
        open_trace(folder)
    (folder / "rank2.safetensors").write_bytes(safetensors({"105_0": np.ones(4)}))
    with pytest.raises(HeatError, match="iteration 105 has no layer 1, unlike other iterations"):
        open_trace(folder)
    (folder / "meta_info.json").write_text("{}")
    with pytest.raises(HeatError, match="counts for None experts"):
        open_trace(folder)


@given(damage=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 300))
def test_damaged_statistics_are_read_or_rejected(
    damage: int, value: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = statistics(tmp_path_factory.mktemp("damaged"), np.ones((1, 1, 2, 4), dtype=np.int64))
    path = folder / "rank0.safetensors"
    content = bytearray(path.read_bytes())
    content[damage % len(content)] = value
    path.write_bytes(bytes(content[: len(content) - cut % len(content)]))
    with contextlib.suppress(HeatError):
        assert open_trace(folder).shape[2] == 4


def test_a_header_with_a_false_size_allocates_no_memory(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "s", np.ones((1, 1, 2, 4), dtype=np.int64))
    text = json.dumps({"100_0": {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]}}).encode()
    (folder / "rank0.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(HeatError, match="is truncated, damaged"):
        open_trace(folder)


def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = statistics(tmp_path / "s", np.ones((1, 1, 2, 4), dtype=np.int64))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        HeatError, match=r"which needs safetensors; install it with: pip install 'safetensors>=[\d.]+'"
    ):
        open_trace(folder)


@pytest.mark.parametrize(
    "content", [b"\x7fELF\x02\x01", b"hello\nworld\n", b"\xff\xfe\x00", b"", b"a,b\n1,2\n"]
)
def test_a_file_of_an_unknown_format_is_rejected_without_naming_a_package(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "junk").write_bytes(content)
    with pytest.raises(HeatError) as caught:
        open_trace(tmp_path / "junk")
    assert "pyarrow" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_expert_columns_of_a_csv_may_be_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "weights.csv").write_text("expert_1,expert_0,expert_2\n5,4,6\n8,7,9\n")
    assert read_heat(tmp_path / "weights.csv").tolist() == [[[4, 5, 6], [7, 8, 9]]]
    (tmp_path / "weights.csv").write_text("expert_1,expert_3\n5,4\n")
    with pytest.raises(
        HeatError, match=r"header 'expert_1,expert_3'; expected step,layer,expert,tokens.*or expert_0"
    ):
        open_trace(tmp_path / "weights.csv")


def test_a_csv_of_counts_may_have_extra_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "heat.csv"
    path.write_bytes(b'\xef\xbb\xbftokens,expert,"layer",step,rank\r\n3,1,0,7,0\r\n4,0,1,8,1\r\n')
    assert read_heat(path).tolist() == [[[0, 3], [0, 0]], [[0, 0], [4, 0]]]


def test_parquet_files_without_heat_are_rejected(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="PARQUET IS NOT TESTED: pyarrow is not installed")
    from pyarrow import parquet

    path = tmp_path / "heat.parquet"
    parquet.write_table(pyarrow.table({"step": [1]}), path)
    with pytest.raises(
        HeatError, match=r"is not a Parquet file with the columns step, layer, expert, tokens.*layer"
    ):
        open_trace(path)
    parquet.write_table(pyarrow.table({"step": [10], "layer": [0.5], "expert": [0], "tokens": [7]}), path)
    with pytest.raises(
        HeatError, match=r"row 1 holds .* expected step, layer, expert, tokens as non-negative numbers"
    ):
        open_trace(path)
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(HeatError, match="is not a Parquet file"):
        open_trace(path)


def test_a_slice_of_a_table_starts_at_its_first_step(tmp_path: Path) -> None:
    heat_TLE = np.random.default_rng(1).poisson(0.1, (200, 3, 4))
    copy_trace(ArrayTrace(heat_TLE), tmp_path / "part.csv", (70, 190), (1, 3))
    np.testing.assert_array_equal(read_heat(tmp_path / "part.csv"), heat_TLE[70:190, 1:3])


def test_parquet_without_pyarrow_is_rejected_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        OutputError, match=r"heat.parquet: is a Parquet file, which needs pyarrow; .*\(import of"
    ):
        check_trace_output(tmp_path / "heat.parquet")
    check_trace_output(tmp_path / "heat.npz")
