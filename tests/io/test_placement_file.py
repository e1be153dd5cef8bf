"""Tests of placement files: round trips in each format, and a one-line error for any other file."""

import json

import numpy as np
import pytest
import yaml

from eplb_core.placement import Placement, PlacementError
from eplb_service.io.placement_file import _expert_map_document, read_map, read_placement, write_placement

PLACEMENT = Placement.linear(layers=3, experts=6, ranks=4, slots=2)


def test_a_file_for_an_engine_has_the_keys_that_the_engine_reads(tmp_path):
    tables = PLACEMENT.default_log2phy()
    flat = PLACEMENT.phy2log_LRS.reshape(3, 8).tolist()
    write_placement(tmp_path / "a.json", PLACEMENT, tables)
    assert json.loads((tmp_path / "a.json").read_text()) == _expert_map_document(PLACEMENT, range(3))
    write_placement(tmp_path / "b.json", PLACEMENT, tables, "sglang")
    assert json.loads((tmp_path / "b.json").read_text()) == {"physical_to_logical_map": flat}
    write_placement(tmp_path / "c.yaml", PLACEMENT, tables, layer_numbers=range(3, 3 + PLACEMENT.layers))
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == {
        "num_slots": 8,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {3: flat[0], 4: flat[1], 5: flat[2]},
    }


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("a.csv", None, "must end in"),
        ("a.json", "npz", "must end in .npz for this format"),
        (
            "a.npz",
            "deepspeed",
            "unknown format 'deepspeed'; choose one of npz, vllm-ascend, sglang, tensorrt-llm, vllm",
        ),
    ],
)
def test_an_unsuitable_format_is_rejected(tmp_path, name, format, message):
    with pytest.raises(PlacementError) as caught:
        write_placement(tmp_path / name, PLACEMENT, PLACEMENT.default_log2phy(), format)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_saved_by_sglang_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "placement.pt"
    torch.save({"physical_to_logical_map": torch.tensor(PLACEMENT.phy2log_LRS.reshape(3, 8))}, path)
    assert np.array_equal(read_placement(path, experts=6, ranks=4).phy2log_LRS, PLACEMENT.phy2log_LRS)


def test_an_expert_map_numbers_its_layers_and_devices():
    document = _expert_map_document(PLACEMENT, range(3))
    assert document["moe_layer_count"] == 3
    assert document["layer_list"][1]["layer_id"] == 1
    assert document["layer_list"][1]["device_count"] == 4
    assert document["layer_list"][1]["device_list"][3] == {"device_id": 3, "device_expert": [0, 1]}


def test_an_expert_map_may_list_layers_and_devices_in_any_order(tmp_path):
    document = _expert_map_document(PLACEMENT, range(3))
    document["layer_list"].reverse()
    for layer in document["layer_list"]:
        layer["device_list"].reverse()
    path = tmp_path / "map.json"
    path.write_text(json.dumps(document))
    assert np.array_equal(read_placement(path, experts=6, ranks=4).phy2log_LRS, PLACEMENT.phy2log_LRS)


def refusal(path, experts=6, ranks=4):
    with pytest.raises(PlacementError) as caught:
        read_placement(path, experts, ranks)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"layer_list": [', "is not JSON, or is truncated"),
        ("\xff", "is not JSON"),
        ("{}", "found nothing"),
        ('{"layer_list": [{"layer_id": 0}]}', "the same number of experts ('device_list')"),
        ('{"physical_to_logical_map": [[0, 1], [0]]}', "the same number of experts"),
        ('{"physical_to_logical_map": [["0", "1"]]}', "integers"),
        ('{"layer_list": []}', "expected 0, 1, 2"),
        ("[]", "found list"),
        ('{"layer_list": [{"layer_id": 1, "device_list": []}]}', "its device_ids are []"),
        ('{"layer_list": [{"layer_id": 1}, {"layer_id": 1}]}', "its layer_ids are [1, 1]"),
        (
            '{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": [0, 1]},'
            ' {"device_id": 1, "device_expert": [0]}]}]}',
            "the same number of experts",
        ),
        (
            '{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": [0, 1.5]}]}]}',
            "integers",
        ),
    ],
)
def test_json_that_is_not_an_expert_map_is_rejected(tmp_path, text, message):
    path = tmp_path / "map.json"
    path.write_text(text, encoding="latin-1")
    assert message in refusal(path, ranks=1)


def test_placements_of_the_wrong_shape_are_rejected(tmp_path):
    path = tmp_path / "placement.npz"
    np.savez(path, phy2log=PLACEMENT.phy2log_LRS)
    assert "places experts on 4 ranks; expected 8" in refusal(path, ranks=8)
    assert "expert 6 has no slot" in refusal(path, experts=9)
    np.savez(path, experts=PLACEMENT.phy2log_LRS)
    assert "expected phy2log" in refusal(path)
    np.savez(path, phy2log=np.zeros((3, 4, 2), dtype=np.int32))
    assert "expert 1 has no slot" in refusal(path)


@pytest.mark.parametrize("numbers", [None, range(3, 6), range(1, 6, 2)])
def test_an_sglang_file_has_a_row_for_every_model_layer(tmp_path, numbers):
    path = tmp_path / "map.json"
    rows_of_layers = list(numbers or range(3))
    write_placement(path, PLACEMENT, PLACEMENT.default_log2phy(), "sglang", numbers)
    rows_LP = json.loads(path.read_text())["physical_to_logical_map"]
    flat_LP = PLACEMENT.phy2log_LRS.reshape(3, 8).tolist()
    assert [rows_LP[number] for number in rows_of_layers] == flat_LP
    in_order = [slot % 6 for slot in range(8)]
    assert all(row == in_order for number, row in enumerate(rows_LP) if number not in rows_of_layers)
    assert len(rows_LP) == rows_of_layers[-1] + 1


@pytest.mark.parametrize("numbers", [[0] * PLACEMENT.layers, [1], range(PLACEMENT.layers, 0, -1)])
def test_invalid_layer_numbers_are_rejected(tmp_path, numbers):
    with pytest.raises(PlacementError, match="increasing, non-negative numbers"):
        write_placement(tmp_path / "map.json", PLACEMENT, PLACEMENT.default_log2phy(), "sglang", numbers)


def test_a_vllm_file_has_layer_numbers_as_text_and_a_single_placement(tmp_path):
    path = tmp_path / "mapping.jsonl"
    many = Placement.linear(layers=11, experts=6, ranks=2, slots=4)
    write_placement(path, many, many.default_log2phy())
    record = json.loads(path.read_text())
    assert (record["num_redundant_experts"], record["num_slots"]) == (2, 8)
    record["initial_global_assignments"]["10"] = [5, 4, 3, 2, 1, 0, 3, 2]
    path.write_text('{"record_type": "session_metadata"}\n' + json.dumps(record) + "\n")
    read = read_placement(path, experts=6, ranks=2).phy2log_LRS.reshape(11, 8)
    assert read[10].tolist() == [5, 4, 3, 2, 1, 0, 3, 2]
    assert np.array_equal(read[2], many.phy2log_LRS[2].ravel())
    path.write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(PlacementError, match="holds 2 records of type eplb_initial_mapping; expected one"):
        read_placement(path, experts=6, ranks=2)


NUMBERED = {"npz": ".npz", "sglang": ".json", "tensorrt-llm": ".yaml"}
"""Formats that contain the model's layer numbers, and their suffixes."""


def different_layers(count):
    """Return a placement whose layers differ, so that a shifted row is detected."""
    rows = [np.roll(np.arange(8) % 6, layer).reshape(4, 2) for layer in range(count)]
    return Placement(np.array(rows), 6)


@pytest.mark.parametrize("format", NUMBERED)
@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ((3, 5, 61), "4"),
        ((0, 1, 2), "3 to 5"),
        ((4, 5, 6), "3"),
        ((3, 4, 61), "5"),
    ],
)
def test_layers_are_matched_by_their_numbers(tmp_path, format, written, missing):
    path = tmp_path / f"placement{NUMBERED[format]}"
    placement = different_layers(3)
    write_placement(path, placement, placement.default_log2phy(), format, written)
    if format == "sglang" and max(written) >= 5:
        # This format has a row for every model layer. Dense layers list the experts in order.
        read = read_placement(path, 6, 4, (3, 4, 5))
        rows = dict(zip(written, placement.phy2log_LRS.tolist(), strict=True))
        in_order = (np.arange(8) % 6).reshape(4, 2).tolist()
        assert read.phy2log_LRS.tolist() == [rows.get(number, in_order) for number in (3, 4, 5)]
        return
    with pytest.raises(PlacementError, match=f"layers {missing}: the trace has layers 3 to 5, but"):
        read_placement(path, 6, 4, (3, 4, 5))


@pytest.mark.parametrize("format", ["npz", "vllm-ascend", "sglang", "tensorrt-llm", "vllm"])
def test_a_draft_layer_has_a_row_and_shifts_no_other_row(tmp_path, format):
    suffix = {"vllm-ascend": ".json", "vllm": ".jsonl"}.get(format) or NUMBERED[format]
    numbers = (3, 4, 6)
    path = tmp_path / f"placement{suffix}"
    placement = different_layers(3)
    write_placement(path, placement, placement.default_log2phy(), format, numbers, draft_layers=2)
    assert np.array_equal(read_placement(path, 6, 4, numbers).phy2log_LRS, placement.phy2log_LRS)
    rows = read_map(path).phy2log.reshape(-1, 8)
    assert rows[-2:].tolist() == [(np.arange(8) % 6).tolist()] * 2
    assert len(rows) == (9 if format == "sglang" else 5)
    if format == "tensorrt-llm":
        assert list(yaml.safe_load(path.read_text())["initial_global_assignments"]) == [3, 4, 6, 7, 8]
    if format == "vllm-ascend":
        document = json.loads(path.read_text())
        assert document["moe_layer_count"] == len(document["layer_list"]) == 5
    if format == "npz":
        tables = np.load(path)["log2phy"]
        assert tables.shape == (4, 5, 6)
        assert (rows[np.arange(5)[:, None], tables[0]] == np.arange(6)).all()


def test_a_map_that_has_a_draft_layer_but_lacks_a_model_layer_is_rejected(tmp_path):
    path = tmp_path / "map.yaml"
    placement = different_layers(4)
    write_placement(path, placement, placement.default_log2phy(), layer_numbers=(3, 4, 6, 7))
    with pytest.raises(
        PlacementError, match="layers 5: the trace has layers 3 to 6, but the file has 3, 4, 6, 7"
    ):
        read_placement(path, 6, 4, (3, 4, 5, 6))
    with pytest.raises(PlacementError, match="places layers 3, 4, 6, 7, which cannot be matched"):
        read_placement(path, 6, 4)


def test_an_expert_map_without_layer_ids_is_read_in_order(tmp_path):
    placement = different_layers(3)
    document = _expert_map_document(placement, range(3))
    for layer in document["layer_list"]:
        del layer["layer_id"]
        for device in layer["device_list"]:
            del device["device_id"]
    path = tmp_path / "map.json"
    path.write_text(json.dumps(document))
    assert np.array_equal(read_placement(path, 6, 4, (3, 4, 5)).phy2log_LRS, placement.phy2log_LRS)
