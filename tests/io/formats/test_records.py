"""Tests of JSON Lines from vLLM and Megatron and of responses that list experts: correct heat, or an error."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace, read_heat
from tests.io import traces

PHY2LOG_LP = traces.PHY2LOG_LP[:2]
META = {
    "record_type": "eplb_load_meta",
    "version": 1,
    "model": "moe",
    "num_ranks": 2,
    "num_redundant_experts": 2,
}


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def stats(step: int, load_LP: np.ndarray, map_LP: np.ndarray | None = PHY2LOG_LP) -> dict[str, Any]:
    """Return a record in vLLM's format."""
    record = {"record_type": "eplb_load_stats", "version": 1, "step": step, "expert_load": load_LP.tolist()}
    return record if map_LP is None else {**record, "p2l_map": map_LP.tolist()}


# vLLM's expert load


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 8))
def test_vllm_load_is_summed_with_the_map_in_each_record(
    seed: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    maps = [rng.permuted(PHY2LOG_LP, axis=1) if rng.random() < 0.3 else PHY2LOG_LP for _ in range(steps)]
    loads = [rng.integers(0, 1000, PHY2LOG_LP.shape) + 1 for _ in range(steps)]
    path = tmp_path_factory.mktemp("vllm") / "load.jsonl"
    write_lines(path, [META, *(stats(step, loads[step], maps[step]) for step in range(steps))])
    trace = open_trace(path)
    expected = [traces.by_expert([load], map_LP, 4)[0] for load, map_LP in zip(loads, maps, strict=True)]
    np.testing.assert_array_equal(trace.heat(0, trace.steps), expected)
    assert (trace.facts.model, trace.facts.ranks, trace.facts.slots) == ("moe", 2, 3)


def test_vllm_load_without_a_map_is_rejected(tmp_path: Path) -> None:
    load_LP = np.arange(12).reshape(2, 6)
    path = write_lines(tmp_path / "load.jsonl", [META, stats(1, load_LP, None)])
    with pytest.raises(
        HeatError, match=r"line 2 counts tokens by slot but has no p2l_map; pass .* with --map"
    ):
        open_trace(path)
    heat = read_heat(path, ReadAs(phy2log=PHY2LOG_LP))
    np.testing.assert_array_equal(heat, traces.by_expert([load_LP], PHY2LOG_LP, 4))


def test_vllm_load_of_one_record_or_with_idle_steps_is_read(tmp_path: Path) -> None:
    load_LP = np.arange(12).reshape(2, 6)
    path = write_lines(tmp_path / "one.jsonl", [stats(1, load_LP)])
    np.testing.assert_array_equal(read_heat(path), traces.by_expert([load_LP], PHY2LOG_LP, 4))
    idle = stats(2, 0 * load_LP)
    beside = {"record_type": "bench_run_start", "label": "warm-up"}
    trace = open_trace(write_lines(path, [beside, META, idle, stats(3, load_LP), idle]))
    assert trace.steps == 1
    assert "2 steps left out (no tokens)" in trace.facts.origin


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([META, META], "has no eplb_load_stats with tokens"),
        (
            [META, stats(1, np.ones((2, 5), int))],
            r"line 2 has counts of shape \[2, 5\] \(layers, slots\), unlike its map",
        ),
        (
            [META, stats(1, np.ones(6))],
            r"line 2 holds float64 of shape \[6\] as expert_load; expected integers",
        ),
        (
            [stats(1, np.ones((2, 6), int)), stats(2, np.ones((1, 6), int), PHY2LOG_LP[:1])],
            r"line 2 has counts of shape \[1, 6\] \(layers, slots\), unlike its map or an earlier record",
        ),
        ([META, stats(1, np.ones((2, 6), int), -PHY2LOG_LP)], "the map refers to experts -3 to 0"),
        (
            [{"record_type": "other"}, {}],
            "line 1 is not a record of a known kind; its fields are record_type",
        ),
    ],
)
def test_invalid_vllm_load_is_rejected(tmp_path: Path, records: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(HeatError, match=message):
        open_trace(write_lines(tmp_path / "load.jsonl", records))


def test_the_error_for_a_truncated_line_names_the_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "load.jsonl", [META, stats(1, np.ones((2, 6), dtype=int))])
    with path.open("a") as file:
        file.write('{"record_type": "eplb_load_st')
    with pytest.raises(HeatError, match=r"line 3 is not JSON .*if its writer was stopped"):
        open_trace(path)


# Megatron's router trace


def routed(step: int, layer: int, rank: int, chosen_KC: np.ndarray, **fields: Any) -> dict[str, Any]:
    """Return a record in Megatron's format."""
    return {
        "step": step,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "num_tokens": len(chosen_KC),
        "topk": chosen_KC.shape[1],
        "top_indices": chosen_KC.tolist(),
        **fields,
    }


def megatron_folder(folder: Path, seed: int) -> np.ndarray:
    """Write the files of two ranks, with two micro-batches per step, and return their heat."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    heat_TLE = np.zeros((3, 2, 8), dtype=np.int64)
    for rank in range(2):
        records = []
        for step in range(3):
            for layer, number in enumerate((1, 3)):
                for _ in range(2):
                    chosen_KC = np.array([rng.permutation(8)[:2] for _ in range(5)])
                    records.append(routed(step, number, rank, chosen_KC))
                    np.add.at(heat_TLE[step, layer], chosen_KC, 1)
            records.append(routed(step, 0, rank, np.zeros((5, 2), dtype=int), block="mtp", mtp_idx=0))
        write_lines(folder / f"router_trace_rank{rank}.jsonl", records)
    return heat_TLE


@given(seed=st.integers(0, 2**32 - 1))
def test_megatron_ranks_and_microbatches_are_summed(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("megatron") / "trace"
    heat_TLE = megatron_folder(folder, seed)
    trace = open_trace(folder, ReadAs(experts=8))
    np.testing.assert_array_equal(trace.heat(0, trace.steps), heat_TLE)
    assert trace.facts.layer_numbers == (1, 3)
    assert trace.facts.top_k == 2
    assert trace.tokens(0, 1) == [20]
    assert trace.facts.origin == "Megatron router trace of 2 ranks, without multi-token prediction"


def test_the_file_of_one_megatron_rank_is_rejected(tmp_path: Path) -> None:
    megatron_folder(tmp_path / "trace", 0)
    alone = tmp_path / "trace" / "router_trace_rank0.jsonl"
    with pytest.raises(HeatError, match="has only rank 0's tokens"):
        open_trace(alone)
    alone.rename(tmp_path / "elsewhere.jsonl")
    assert open_trace(tmp_path / "elsewhere.jsonl").steps == 3
    with pytest.raises(HeatError, match=r"has no router_trace_rank0.jsonl"):
        open_trace(tmp_path / "trace")


def test_a_step_with_a_missing_layer_is_skipped(tmp_path: Path) -> None:
    chosen_KC = np.array([[0, 1], [2, 3]])
    records = [routed(step, layer, 0, chosen_KC) for step in range(3) for layer in range(2)]
    trace = open_trace(write_lines(tmp_path / "a.jsonl", records[:-1]))
    assert trace.steps == 2
    assert "1 incomplete steps left out" in trace.facts.origin
    with pytest.raises(HeatError, match="refers to expert 3, but there are only 3"):
        open_trace(tmp_path / "a.jsonl", ReadAs(experts=3))
    write_lines(tmp_path / "a.jsonl", [routed(0, 0, 0, chosen_KC), routed(0, 0, 0, chosen_KC - 1)])
    with pytest.raises(HeatError, match="line 2 holds top_indices from -1"):
        open_trace(tmp_path / "a.jsonl")
    write_lines(tmp_path / "a.jsonl", [{**routed(0, 0, 0, chosen_KC), "rank": None}] * 2)
    with pytest.raises(HeatError, match="line 1 has rank None"):
        open_trace(tmp_path / "a.jsonl")


# Responses


def routes_of(seed: int, tokens: int, layers: int = 3, experts: int = 16, choices: int = 4) -> np.ndarray:
    """Return distinct experts for each token, ``[tokens, layers, choices]``."""
    scores = np.random.default_rng(seed).random((tokens, layers, experts))
    return np.argsort(scores, axis=2)[:, :, :choices]


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def vllm_response(chosen_KLC: np.ndarray, prompt: int) -> dict[str, Any]:
    completion = len(chosen_KLC) + 1 - prompt
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [{"text": "", "routed_experts": npy(chosen_KLC.astype(np.uint8))}], "usage": usage}


def sglang_response(chosen_KLC: np.ndarray, prompt: int) -> dict[str, Any]:
    numbers = base64.b64encode(chosen_KLC.astype("<i4").tobytes()).decode()
    completion = len(chosen_KLC) + 1 - prompt
    return {
        "meta_info": {"routed_experts": numbers, "prompt_tokens": prompt, "completion_tokens": completion}
    }


def test_a_trace_of_responses_decodes_them_concurrently_without_their_prompts(tmp_path: Path) -> None:
    routes = [routes_of(seed, 6 + 4) for seed in range(4)]
    generated = np.concatenate([chosen_KLC[6:] for chosen_KLC in routes])
    np.savez(tmp_path / "routes.npz", routes=generated, req_ptr=np.arange(0, 20, 4), num_experts=16)
    expected = read_heat(tmp_path / "routes.npz", ReadAs(batch=4))
    assert len(expected) == 4
    read_as = ReadAs(batch=4, experts=16, top_k=4)
    for make in (vllm_response, sglang_response):
        path = write_lines(tmp_path / "responses.jsonl", [make(chosen_KLC, 6) for chosen_KLC in routes])
        trace = open_trace(path, read_as)
        np.testing.assert_array_equal(trace.heat(0, trace.steps), expected)
        assert "prompts left out" in trace.facts.origin
        assert "64" not in trace.facts.batching
        path.write_text(json.dumps([make(chosen_KLC, 6) for chosen_KLC in routes], indent=1))
        np.testing.assert_array_equal(read_heat(path, read_as), expected)


def test_sglang_responses_are_rejected_unless_top_k_implies_their_shape(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [sglang_response(routes_of(0, 9), 5)] * 2)
    with pytest.raises(HeatError, match=r"routed_experts has 12 numbers per token .* --top-k"):
        open_trace(path, ReadAs(batch=2))
    with pytest.raises(HeatError, match=r"set --top-k to .*, a divisor of 12"):
        open_trace(path, ReadAs(batch=2, top_k=5))
    with pytest.raises(HeatError, match="twice, so 12 choices per layer is probably wrong"):
        open_trace(path, ReadAs(batch=2, top_k=12))
    response = sglang_response(routes_of(0, 9), 5)
    response["meta_info"]["prompt_tokens"] = 7
    with pytest.raises(HeatError, match="request the experts from the start of the sequence"):
        open_trace(write_lines(path, [response] * 2), ReadAs(batch=2, top_k=4))
    del response["meta_info"]["prompt_tokens"]
    with pytest.raises(HeatError, match="prompt_tokens or completion_tokens is missing"):
        open_trace(write_lines(path, [response] * 2), ReadAs(batch=2, top_k=4))


def test_dense_layers_are_skipped_and_missing_choices_are_not_counted(tmp_path: Path) -> None:
    chosen_KLC = routes_of(1, 12)
    chosen_KLC[:, 0] = 0
    chosen_KLC[3, 1] = -1
    numbers = {"choices": [{"routed_experts": chosen_KLC.tolist()}], "usage": {}}
    path = tmp_path / "response.json"
    path.write_text(json.dumps(numbers))
    trace = open_trace(path, ReadAs(batch=1, experts=16))
    assert trace.shape == (12, 2, 16)
    assert trace.facts.layer_numbers == (1, 2)
    assert "prompts included, 1 dense layers left out" in trace.facts.origin
    np.testing.assert_array_equal(trace.heat(0, 12).sum(axis=(0, 2)), [11 * 4, 12 * 4])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("not base64!", "not a valid routed_experts in base64"),
        (
            npy(np.ones(3)),
            r"holds float64 of shape \[3\] as routed_experts; expected integers of shape \[tokens, layers, choices\]",
        ),
        (base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "is truncated, damaged"),
        (npy(routes_of(0, 9))[:80], "which is larger than the file|is truncated, damaged"),
        ([[1, 2], [3]], "holds no numbers"),
        (npy(np.zeros((4, 2, 2), dtype=np.uint8)), "every layer looks like a dense one"),
    ],
)
def test_invalid_responses_are_rejected(tmp_path: Path, value: object, message: str) -> None:
    path = tmp_path / "response.json"
    path.write_text(json.dumps({"choices": [{"routed_experts": value}]}))
    with pytest.raises(HeatError, match=message):
        open_trace(path, ReadAs(batch=2))


def test_responses_without_generated_tokens_are_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [vllm_response(routes_of(0, 5), 5)] * 2)
    with pytest.raises(HeatError, match="has no generated token"):
        open_trace(path)
    response = vllm_response(routes_of(0, 5), 5)
    response["usage"]["completion_tokens"] = 9
    with pytest.raises(HeatError, match="fewer rows than tokens"):
        open_trace(write_lines(path, [response] * 2))
