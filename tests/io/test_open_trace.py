"""Tests that a trace in any format is recognised by its content and read correctly."""

import json

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace, read_heat
from tests.io.traces import HEAT_TLE, PHY2LOG_LP, refusal, slots_of


@pytest.mark.parametrize("name", ["heat", "counts", "logical_count"])
def test_an_npz_array_is_read_under_each_accepted_name(tmp_path, name):
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, other=np.zeros(1), **{name: HEAT_TLE})
    heat = read_heat(path)
    assert heat.dtype == np.int64
    assert np.array_equal(heat, HEAT_TLE)


def test_an_npy_file_is_memory_mapped_and_keeps_fractions(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, HEAT_TLE / 2)
    trace = open_trace(path)
    assert isinstance(trace.heat_TLE, np.memmap)
    assert trace.shape == (2, 3, 4)
    assert np.array_equal(trace.heat(1, 2), HEAT_TLE[1:] / 2)


def test_deepseek_weights_are_read_as_one_step(tmp_path):
    path = tmp_path / "weights.npy"
    np.save(path, HEAT_TLE[0])
    assert np.array_equal(read_heat(path), HEAT_TLE[:1])


@pytest.mark.parametrize(
    "document",
    [
        HEAT_TLE.tolist(),
        {"heat": HEAT_TLE.tolist(), "model": "x"},
        {"rank": 0, "logical_count": HEAT_TLE.tolist()},
    ],
    ids=["array", "named", "SGLang"],
)
def test_json_documents_are_read(tmp_path, document):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    assert np.array_equal(read_heat(path), HEAT_TLE)


def test_csv_counts_and_weights_are_read(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{count},{t + 5},{layer},{e}" for (t, layer, e), count in np.ndenumerate(HEAT_TLE) if count]
    path.write_text("tokens,step,layer,expert\n" + "\n".join(rows[::-1]) + "\n")
    assert np.array_equal(read_heat(path), HEAT_TLE)
    path.write_text("\n".join(",".join(map(str, row)) for row in HEAT_TLE[0]))
    assert np.array_equal(read_heat(path, ReadAs(meaning="weights")), HEAT_TLE[:1])


def test_routes_are_batched_by_the_documented_rule(tmp_path):
    path = tmp_path / "routes.npz"
    routes_KLC = np.array([[[0, 1]], [[1, 2]], [[2, 3]], [[3, 0]], [[0, 2]], [[1, 3]]], dtype=np.uint8)
    np.savez(path, routes=routes_KLC, req_ptr=np.array([0, 3, 4, 6]), num_experts=np.int64(5))
    trace = open_trace(path, ReadAs(batch=2))
    # Requests 0 (tokens 0, 1, 2) and 1 (token 3) begin; request 2 (tokens 4, 5) replaces request 1.
    steps = [(0, 3), (1, 4), (2, 5)]
    wanted_TE = np.zeros((3, 5), dtype=int)
    for step, tokens in enumerate(steps):
        for token in tokens:
            wanted_TE[step, routes_KLC[token, 0]] += 1
    assert np.array_equal(trace.heat(0, 3)[:, 0], wanted_TE)
    assert trace.tokens(0, 3).tolist() == [2, 2, 2]
    assert trace.facts.top_k == 2
    assert "3 requests: 2 decoded concurrently" in trace.facts.batching
    assert open_trace(path, ReadAs(batch=3)).steps == 1


def test_source_heat_and_phases_are_read_with_the_heat(tmp_path):
    path = tmp_path / "demo.npz"
    source_TRLE = np.random.default_rng(0).integers(0, 9, (20, 4, 3, 8))
    phase_T = np.arange(20) % 2
    arrays = {"counts": source_TRLE.sum(axis=1), "source": source_TRLE, "phase": phase_T}
    np.savez(path, **arrays, phase_names=np.array(["chat", "code"]))
    trace = open_trace(path)
    assert trace.facts.ranks == 4
    assert trace.facts.phases == ("chat", "code")
    assert np.array_equal(trace.source(3, 17), source_TRLE[3:17].sum(axis=0))
    assert trace.phase_numbers(4, 8).tolist() == [0, 1, 0, 1]
    np.savez(path, **{**arrays, "source": source_TRLE[:-1]})
    assert "source heat is int64 of shape [19, 4, 3, 8]; expected integers of shape [20, 4, 3, 8]" in refusal(
        path
    )
    np.savez(path, **arrays, phase_names=np.array(["chat"]))
    assert "expected one integer from 0 to 0 per step" in refusal(path)


def test_more_columns_than_experts_suggest_tokens_by_slot(tmp_path):
    path = tmp_path / "load.npy"
    np.save(path, slots_of(HEAT_TLE, PHY2LOG_LP))
    with pytest.raises(
        HeatError, match=r"counts 6 experts, but --experts is 4: if the counts are by physical slot, .* --map"
    ):
        read_heat(path, ReadAs(experts=4))
    assert np.array_equal(read_heat(path, ReadAs(experts=4, phy2log=PHY2LOG_LP)), HEAT_TLE)
