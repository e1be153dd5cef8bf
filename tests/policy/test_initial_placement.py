"""Policy mode starts from the files that ``eplb solve`` writes, and rejects files for another model or engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from eplb_core.placement import Placement
from eplb_service.io.placement_file import write_placement
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb
from worker_agent.policy.initial_placement import InitialPlacementError, read_initial_placement

LAYERS = 3
EXPERTS = 6
RANKS = 4
SLOTS = 2
PHYSICAL = RANKS * SLOTS
FILES = {"npz": ".npz", "vllm-ascend": ".json", "sglang": ".json", "vllm": ".jsonl"}
"""Formats that can be read, and their suffixes."""
EACH_FORMAT = pytest.mark.parametrize("format", FILES)


def rolled(layers: int = LAYERS) -> Placement:
    """Return a placement whose layers differ, so that a shifted row is detected."""
    rows = [
        np.roll(np.arange(PHYSICAL) % EXPERTS, layer + 1).reshape(RANKS, SLOTS) for layer in range(layers)
    ]
    return Placement(np.array(rows, dtype=np.int32), EXPERTS)


def written(folder: Path, format: str, placement: Placement, drafts: int = 0) -> Path:
    path = folder / f"placement{FILES[format]}"
    write_placement(path, placement, placement.default_log2phy(), format, draft_layers=drafts)
    return path


def flat(placement: Placement) -> list[list[int]]:
    rows: list[list[int]] = placement.phy2log_LRS.reshape(placement.layers, -1).tolist()
    return rows


def read(path: Path, layers: int = LAYERS, **changes: int) -> list[list[int]]:
    sizes = {"ranks": RANKS, "slots": SLOTS, "experts": EXPERTS} | changes
    rows_LP = read_initial_placement(path, layers, **sizes)
    assert rows_LP.dtype == np.int64
    rows: list[list[int]] = rows_LP.tolist()
    return rows


@EACH_FORMAT
@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_a_written_placement_is_read_back(format: str, drafts: int, tmp_path: Path) -> None:
    assert read(written(tmp_path, format, rolled(), drafts)) == flat(rolled())


@EACH_FORMAT
def test_a_draft_models_rows_follow_those_of_the_target_model(format: str, tmp_path: Path) -> None:
    path = written(tmp_path, format, rolled(), 2)
    in_order = (np.arange(PHYSICAL) % EXPERTS).tolist()
    assert read(path, 2, first_layer=LAYERS) == [in_order] * 2
    with pytest.raises(InitialPlacementError, match="has 5 layers, but the model has 6"):
        read(path, 3, first_layer=LAYERS)


@EACH_FORMAT
def test_eplb_solve_writes_a_file_from_which_policy_mode_starts(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heat = tmp_path / "heat.npz"
    np.savez(heat, counts=synthetic_heat("static", 20, LAYERS, 16, tokens=256, top_k=2, seed=1))
    files = [tmp_path / f"start{FILES[format]}", tmp_path / "start.npz"]
    for path, name in zip(files, (format, "npz"), strict=True):
        options = ("--ranks", 4, "--slots", 5, "--out", path, "--format", name, "--draft-layers", 1)
        assert eplb(capsys, "solve", "--heat", heat, *options)[0] == 0
    start, expected = (read(path, ranks=4, slots=5, experts=16) for path in files)
    assert start == expected
    assert start != np.tile(np.arange(20) % 16, (LAYERS, 1)).tolist()


def refusal(path: Path, **changes: int) -> str:
    with pytest.raises(InitialPlacementError) as caught:
        read(path, **changes)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@EACH_FORMAT
def test_a_placement_for_another_engine_or_model_is_rejected(format: str, tmp_path: Path) -> None:
    path = written(tmp_path, format, rolled())
    assert "this engine has 4 ranks of 3 slots" in refusal(path, slots=3)
    assert "this engine has 8 ranks of 2 slots" in refusal(path, ranks=8)
    assert "refers to expert 5, but the model's experts are 0 to 4" in refusal(path, experts=5)
    assert "layer 0: expert 6 has no slot" in refusal(path, experts=7)
    for layers in (2, 4):
        assert f"has 3 layers, but the model has {layers} MoE layers" in refusal(path, layers=layers)


def test_a_placement_with_the_right_number_of_slots_on_the_wrong_number_of_ranks_is_rejected(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "npz", rolled())
    assert "places experts on 4 ranks of 2 slots, but this engine has 2 ranks of 4" in refusal(
        path, ranks=2, slots=4
    )


def test_an_expert_may_be_twice_on_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "placement.npz"
    np.savez(path, phy2log=np.array([[0, 0, 1, 2]]))
    assert read(path, 1, ranks=2, slots=2, experts=3) == [[0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "num_slots: 8", "must end in .npz, .json or .jsonl"),
        ("a.npz", "no archive", "is damaged or is not a placement"),
        ("a.json", "{", "is damaged or is not a placement"),
        ("a.json", "[]", "is not a placement: expected physical_to_logical_map"),
        ("a.json", '{"physical_to_logical_map": [[0, 1], [0]]}', "is damaged or is not a placement"),
        ("a.json", '{"physical_to_logical_map": [["0", "1"]]}', "expected integers"),
        ("a.json", '{"physical_to_logical_map": [[0.5, 1]]}', "expected integers"),
        ("a.json", '{"physical_to_logical_map": []}', "expected integers"),
        ("a.json", '{"physical_to_logical_map": [[-1, 0, 1, 2, 3, 4, 5, 0]]}', "refers to expert -1"),
        ("a.json", '{"layer_list": [{"device_list": []}]}', "is damaged or is not a placement ('layer_id')"),
        ("a.jsonl", "", "contains 0 records of type eplb_initial_mapping"),
        ("a.jsonl", "[]", "is damaged or is not a placement"),
    ],
)
def test_a_file_that_is_not_a_placement_is_rejected(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert message in refusal(tmp_path / name, layers=1)


def test_a_missing_file_and_an_archive_without_a_placement_are_rejected(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "none.npz")
    np.savez(tmp_path / "a.npz", heat=np.zeros((1, 8)))
    assert "contains no array named phy2log" in refusal(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", phy2log=np.array([None], dtype=object))
    assert "is damaged or is not a placement" in refusal(tmp_path / "a.npz")


def test_layers_and_devices_may_be_in_any_order(tmp_path: Path) -> None:
    path = written(tmp_path, "vllm-ascend", rolled())
    document = json.loads(path.read_text())
    document["layer_list"].reverse()
    for layer in document["layer_list"]:
        layer["device_list"].reverse()
    path.write_text(json.dumps(document))
    assert read(path) == flat(rolled())
