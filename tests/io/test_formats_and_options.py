"""Tests of all readers: each option has an effect or is rejected, and dense layers are skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_core.placement import Placement
from eplb_service.io import open_trace as opening
from eplb_service.io.copy_trace import copy_trace
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace
from eplb_service.io.placement_file import read_map, write_placement
from eplb_service.io.trace import ArrayTrace, TraceFacts
from tests.io.traces import slots_of

STEPS = 6
EXPERTS = 4
MOE = (3, 5)
"""Indices of the MoE layers in a model with 7 layers."""
LAYERS = 7
PHY2LOG_LP = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]])
HEAT_TLE = np.random.default_rng(0).integers(1, 60, (STEPS, len(MOE), EXPERTS))


def with_dense(heat_TLE: Any) -> Any:
    """Return the heat with a row of zeros for each dense layer."""
    whole_TLE = np.zeros((len(heat_TLE), LAYERS, *heat_TLE.shape[2:]), dtype=np.int64)
    whole_TLE[:, MOE] = heat_TLE
    return whole_TLE


def model_map() -> Any:
    map_LP = np.tile(np.arange(6) % EXPERTS, (LAYERS, 1))
    map_LP[list(MOE)] = PHY2LOG_LP
    return map_LP


def routes() -> Any:
    """Return two distinct choices for each of 6 tokens in the MoE layers, and zeros in the dense layers."""
    chosen_KLC = np.zeros((STEPS, LAYERS, 2), dtype=np.int64)
    chosen_KLC[:, MOE] = [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 3], [0, 1]]] * 2
    return chosen_KLC


def native(folder: Path) -> Path:
    copy_trace(ArrayTrace(HEAT_TLE, TraceFacts(layer_numbers=MOE)), folder / "a.zarr")
    return folder / "a.zarr"


def npz(**arrays: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.savez(folder / "a.npz", **arrays)
        return folder / "a.npz"

    return write


def npy(array: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.save(folder / "a.npy", array)
        return folder / "a.npy"

    return write


def table(suffix: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        copy_trace(ArrayTrace(HEAT_TLE, TraceFacts(layer_numbers=MOE)), folder / f"a{suffix}")
        return folder / f"a{suffix}"

    return write


def text(name: str, *documents: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text("\n".join(map(json.dumps, documents)))
        return folder / name

    return write


def csv_of_weights(folder: Path) -> Path:
    np.savetxt(
        folder / "a.csv", with_dense(HEAT_TLE)[0], fmt="%d", delimiter=",", header="e0,e1,e2,e3", comments=""
    )
    return folder / "a.csv"


def tensorrt_llm(folder: Path) -> Path:
    save = pytest.importorskip(
        "safetensors.numpy", reason="TENSORRT-LLM IS NOT TESTED: safetensors is not installed"
    ).save
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS, "num_experts_per_token": 2}))
    arrays = {
        f"{step}_{layer}": HEAT_TLE[step, row] for step in range(STEPS) for row, layer in enumerate(MOE)
    }
    (folder / "rank0.safetensors").write_bytes(save(arrays))
    return folder


SLOTS_TLP = slots_of(HEAT_TLE, PHY2LOG_LP)
SGLANG_RECORDS = [
    {"forward_pass_id": step, "rank": 0, "global_physical_count": with_dense(SLOTS_TLP)[step].tolist()}
    for step in range(STEPS)
]
VLLM_RECORDS = [
    {"record_type": "eplb_load_stats", "expert_load": counts.tolist(), "p2l_map": model_map().tolist()}
    for counts in with_dense(SLOTS_TLP)
]
MEGATRON_RECORDS = [
    {"step": step, "layer": layer, "rank": 0, "top_indices": [chosen.tolist()]}
    for step in range(STEPS)
    for layer, chosen in enumerate(routes()[step])
    if layer in MOE
]
RESPONSES = [{"routed_experts_of": 0, "meta_info": {"routed_experts": [row.tolist()]}} for row in routes()]

FORMATS: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "native": (native, {"experts"}),
    "npz of heat": (npz(heat=with_dense(HEAT_TLE)), {"meaning", "experts", "phy2log"}),
    "npz of weights": (npz(weight=with_dense(HEAT_TLE)[0]), {"meaning", "experts", "phy2log"}),
    "npz of slots": (
        npz(expert_load_window=with_dense(SLOTS_TLP), physical_to_logical_map=model_map()),
        {"meaning", "experts", "phy2log"},
    ),
    "npz of routes": (
        npz(routes=routes(), req_ptr=np.arange(STEPS + 1)),
        {"meaning", "experts", "batch", "top_k", "phy2log"},
    ),
    "npy of heat": (npy(with_dense(HEAT_TLE)), {"meaning", "experts", "phy2log"}),
    "npy of weights": (npy(with_dense(HEAT_TLE)[0]), {"meaning", "experts", "phy2log"}),
    "csv of counts": (table(".csv"), {"experts"}),
    "csv of weights": (csv_of_weights, {"meaning", "experts", "phy2log"}),
    "parquet": (table(".parquet"), {"experts"}),
    "JSON of heat": (
        text("a.json", {"heat": with_dense(HEAT_TLE).tolist()}),
        {"meaning", "experts", "phy2log"},
    ),
    "SGLang's ring buffer": (
        text("a.json", {"logical_count": with_dense(HEAT_TLE).tolist()}),
        {"meaning", "experts"},
    ),
    "SGLang's records": (
        text("a.json", {"records": SGLANG_RECORDS, "last_physical_to_logical_map": model_map().tolist()}),
        {"experts", "phy2log"},
    ),
    "vLLM's load": (text("a.jsonl", *VLLM_RECORDS), {"experts", "phy2log"}),
    "TensorRT-LLM's statistics": (tensorrt_llm, {"experts"}),
    "Megatron's routes": (text("router.jsonl", *MEGATRON_RECORDS), {"experts"}),
    "responses": (text("a.jsonl", *RESPONSES), {"experts", "batch", "top_k"}),
}
"""For each format, a function that writes a file, and the options that its reader uses."""
OPTIONS: dict[str, tuple[Any, str]] = {
    "meaning": ("weights", "--as"),
    "phy2log": (model_map()[:, ::-1], "--map"),
    "experts": (EXPERTS + 3, "--experts"),
    "batch": (3, "--batch"),
    "top_k": (5, "--top-k"),
}
NEEDED: dict[str, dict[str, Any]] = {
    "npz of routes": {"batch": 2},
    "responses": {"batch": 2},
}
"""Options that these small files need."""


def outcome_of(path: Path, **options: Any) -> str:
    """Return a file's facts and heat, or the error message if it is rejected."""
    try:
        trace = open_trace(path, ReadAs(**options))
        return f"{trace.facts} {trace.heat(0, trace.steps).tolist()}"
    except HeatError as error:
        return str(error)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_an_option_has_an_effect_or_is_rejected(name: str, option: str, tmp_path: Path) -> None:
    write, used = FORMATS[name]
    path = write(tmp_path)
    (value, flag) = OPTIONS[option]
    needed = NEEDED.get(name, {})
    without = outcome_of(path, **needed)
    assert without.startswith("TraceFacts"), without
    value = "slots" if option == "meaning" and "weights" in name else value
    outcome = outcome_of(path, **needed | {option: value})
    if option in used:
        assert outcome != without
    else:
        assert flag in outcome
        assert "has no effect; omit it" in outcome


@pytest.mark.parametrize("name", FORMATS)
def test_stating_the_correct_number_of_experts_does_not_change_the_heat(name: str, tmp_path: Path) -> None:
    path = FORMATS[name][0](tmp_path)
    needed = NEEDED.get(name, {})
    trace = open_trace(path, ReadAs(**needed, experts=EXPERTS))
    np.testing.assert_array_equal(
        trace.heat(0, trace.steps), open_trace(path, ReadAs(**needed)).heat(0, trace.steps)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_dense_layers_are_skipped_and_moe_layers_keep_their_numbers(name: str, tmp_path: Path) -> None:
    trace = open_trace(FORMATS[name][0](tmp_path), ReadAs(**NEEDED.get(name, {})))
    assert trace.facts.layer_numbers == MOE
    assert trace.heat(0, trace.steps).any(axis=(0, 2)).all()
    if "route" not in name and name != "responses":
        expected = HEAT_TLE[:1] if "weights" in name else HEAT_TLE
        np.testing.assert_array_equal(trace.heat(0, trace.steps), expected)


def test_the_experts_option_adds_experts_without_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,layer,expert,tokens\n0,0,6,5\n1,0,2,5\n")
    assert open_trace(tmp_path / "a.csv", ReadAs(experts=8)).shape == (2, 1, 8)
    assert "7 experts, inferred from the highest expert id" in open_trace(tmp_path / "a.csv").facts.origin
    assert "refers to expert 6, but --experts is 4" in outcome_of(tmp_path / "a.csv", experts=4)


@pytest.mark.parametrize(
    "placement",
    [
        np.array([[0, 1, -1, 2], [2, 0, 1, -1]]),
        np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]),
        np.arange(16).reshape(1, 4, 4) % 8,
    ],
    ids=["expert map", "placement", "placement by ranks"],
)
def test_a_placement_is_not_read_as_tokens(placement: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", placement)
    assert "like a placement or an expert map, not tokens" in outcome_of(tmp_path / "a.npy")


class Entry:
    """A stand-in for an installed package's entry point."""

    def __init__(self, name: str, read: Any) -> None:
        self.name = name
        self.value = f"package:{name}"
        self._read = read

    def load(self) -> Any:
        if isinstance(self._read, Exception):
            raise self._read
        return self._read


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*entries: Entry) -> None:
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: entries if group == "eplb.formats" else ()
        )
        opening._formats_of_packages.cache_clear()

    yield install
    opening._formats_of_packages.cache_clear()


def read_lines() -> Any:
    """Load the reader that the docs show."""
    page = (Path(__file__).parents[2] / "docs/files.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    return names["read_lines"]


def test_an_installed_package_can_add_a_format(installed: Any, tmp_path: Path) -> None:
    installed(Entry("lines", read_lines()))
    (tmp_path / "a.lines").write_text("1 2 3\n4 5 6\n")
    assert open_trace(tmp_path / "a.lines").heat(0, 2).tolist() == [[[1, 2, 3]], [[4, 5, 6]]]
    assert "for which --batch has no effect" in outcome_of(tmp_path / "a.lines", batch=4)
    np.savez(tmp_path / "a.npz", heat=HEAT_TLE)
    assert open_trace(tmp_path / "a.npz").shape == HEAT_TLE.shape


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            ImportError("no such module"),
            r"the trace format bad \(package:bad\) cannot be loaded: no such module",
        ),
        (lambda path, read_as: {}["heat"], "the trace format bad failed: KeyError"),
        (lambda path, read_as: [[1]], "the trace format bad returned a list; expected a Trace or None"),
    ],
)
def test_the_error_of_a_failing_reader_names_its_format(
    read: Any, message: str, installed: Any, tmp_path: Path
) -> None:
    installed(Entry("bad", read))
    with pytest.raises(HeatError, match=message):
        open_trace(FORMATS["npz of heat"][0](tmp_path))


def map_file(folder: Path, format: str, numbers: tuple[int, ...], draft_layers: int = 0) -> Path:
    """Write a placement file that contains the rows of ``model_map`` for these model layers."""
    suffix = {"npz": ".npz", "sglang": ".json", "tensorrt-llm": ".yaml"}.get(format, ".json")
    placement = Placement(model_map()[list(numbers)].reshape(len(numbers), 3, 2), EXPERTS)
    path = folder / f"map{suffix}"
    write_placement(path, placement, placement.default_log2phy(), format, numbers, draft_layers)
    return path


SLOTS = {
    "npz of numbered layers": npz(slot_heat=SLOTS_TLP, layer_numbers=np.array(MOE)),
    "npz of all layers": npz(slot_heat=with_dense(SLOTS_TLP)),
    "SGLang's records": text("a.json", {"records": SGLANG_RECORDS}),
    "vLLM's load": text(
        "a.jsonl", *({**record, "p2l_map": model_map()[:, ::-1].tolist()} for record in VLLM_RECORDS)
    ),
}
"""Formats with tokens by slot, whose map is missing or wrong."""


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("format", ["npz", "sglang", "tensorrt-llm"])
def test_a_map_is_matched_by_layer_number(name: str, format: str, tmp_path: Path) -> None:
    read_as = read_map(map_file(tmp_path, format, MOE, draft_layers=1))
    trace = open_trace(SLOTS[name](tmp_path), replace(read_as, experts=EXPERTS))
    assert trace.facts.layer_numbers == MOE
    np.testing.assert_array_equal(trace.heat(0, trace.steps), HEAT_TLE)


def test_a_map_numbered_by_moe_layer_is_matched_in_order(tmp_path: Path) -> None:
    read_as = read_map(map_file(tmp_path, "vllm-ascend", MOE, draft_layers=3))
    trace = open_trace(SLOTS["npz of numbered layers"](tmp_path), read_as)
    np.testing.assert_array_equal(trace.heat(0, trace.steps), HEAT_TLE)


def test_a_map_without_a_layer_that_has_tokens_is_rejected(tmp_path: Path) -> None:
    read_as = read_map(map_file(tmp_path, "tensorrt-llm", (3, 4)))
    for name, whose in (
        ("npz of numbered layers", "3, 5"),
        ("npz of all layers", "7 layers without numbers"),
    ):
        with pytest.raises(HeatError, match=f"has heat for .*{whose}, but the map is for layers 3, 4"):
            open_trace(SLOTS[name](tmp_path), read_as)
