"""A placement survives being written and read in each format; a file that is none is refused in one line."""

import json

import numpy as np
import pytest
import yaml

from eplb_service.io.placement_file import _expert_map_document, read_placement, write_placement
from eplb_service.placement import Placement, PlacementError

PLACEMENT = Placement.linear(layers=3, experts=6, ranks=4, slots=2)


def test_each_engine_finds_its_own_keys(tmp_path):
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
        ("a.json", "npz", "must end in .npz, as the format has it"),
        (
            "a.npz",
            "deepspeed",
            "unknown format 'deepspeed'; choose one of npz, vllm-ascend, sglang, tensorrt-llm, vllm",
        ),
    ],
)
def test_formats_that_cannot_be_written(tmp_path, name, format, message):
    with pytest.raises(PlacementError) as caught:
        write_placement(tmp_path / name, PLACEMENT, PLACEMENT.default_log2phy(), format)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_reads_what_sglang_saves(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "placement.pt"
    torch.save({"physical_to_logical_map": torch.tensor(PLACEMENT.phy2log_LRS.reshape(3, 8))}, path)
    assert np.array_equal(read_placement(path, experts=6, ranks=4).phy2log_LRS, PLACEMENT.phy2log_LRS)


def test_expert_map_names_devices_and_layers():
    document = _expert_map_document(PLACEMENT, range(3))
    assert document["moe_layer_count"] == 3
    assert document["layer_list"][1]["layer_id"] == 1
    assert document["layer_list"][1]["device_count"] == 4
    assert document["layer_list"][1]["device_list"][3] == {"device_id": 3, "device_expert": [0, 1]}


def test_expert_map_may_list_layers_and_devices_in_any_order(tmp_path):
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
        ('{"layer_list": [', "is not JSON, or truncated"),
        ("\xff", "is not JSON"),
        ("{}", "found nothing"),
        ('{"layer_list": [{"layer_id": 0}]}', "equally many experts ('device_list')"),
        ('{"physical_to_logical_map": [[0, 1], [0]]}', "equally many experts"),
        ('{"physical_to_logical_map": [["0", "1"]]}', "integers"),
        ('{"layer_list": []}', "expected 0, 1, 2"),
        ("[]", "found list"),
        ('{"layer_list": [{"layer_id": 1, "device_list": []}]}', "its layer_ids are [1]"),
        (
            '{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": [0, 1]},'
            ' {"device_id": 1, "device_expert": [0]}]}]}',
            "equally many experts",
        ),
        (
            '{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": [0, 1.5]}]}]}',
            "integers",
        ),
    ],
)
def test_json_that_is_no_expert_map_is_refused(tmp_path, text, message):
    path = tmp_path / "map.json"
    path.write_text(text, encoding="latin-1")
    assert message in refusal(path, ranks=1)


def test_placements_of_another_shape_are_refused(tmp_path):
    path = tmp_path / "placement.npz"
    np.savez(path, phy2log=PLACEMENT.phy2log_LRS)
    assert "places on 4 ranks, expected 8" in refusal(path, ranks=8)
    assert "cannot hold 9 experts" in refusal(path, experts=9)
    np.savez(path, experts=PLACEMENT.phy2log_LRS)
    assert "expected phy2log" in refusal(path)
    np.savez(path, phy2log=np.zeros((3, 4, 2), dtype=np.int32))
    assert "expert 1 is in no slot" in refusal(path)


@pytest.mark.parametrize("numbers", [None, range(3, 6), range(1, 6, 2)])
def test_sglang_counts_all_layers_of_the_model_and_gets_each_where_it_looks_for_it(tmp_path, numbers):
    path, places = tmp_path / "map.json", list(numbers or range(3))
    write_placement(path, PLACEMENT, PLACEMENT.default_log2phy(), "sglang", numbers)
    rows_LP = json.loads(path.read_text())["physical_to_logical_map"]
    flat_LP = PLACEMENT.phy2log_LRS.reshape(3, 8).tolist()
    assert [rows_LP[number] for number in places] == flat_LP
    in_order = [slot % 6 for slot in range(8)]
    assert all(row == in_order for number, row in enumerate(rows_LP) if number not in places)
    assert len(rows_LP) == places[-1] + 1


@pytest.mark.parametrize("numbers", [[0] * PLACEMENT.layers, [1], range(PLACEMENT.layers, 0, -1)])
def test_layer_numbers_that_are_none_are_refused(tmp_path, numbers):
    with pytest.raises(PlacementError, match="expected rising ones"):
        write_placement(tmp_path / "map.json", PLACEMENT, PLACEMENT.default_log2phy(), "sglang", numbers)


def test_vllm_s_file_names_layers_as_text_and_has_one_placement(tmp_path):
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
    with pytest.raises(PlacementError, match="holds 2 records eplb_initial_mapping; expected one"):
        read_placement(path, experts=6, ranks=2)
