"""Tests of SGLang dumps: ring buffers, dense layers and one file per rank are read, and invalid dumps are rejected."""

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace
from tests.io import traces

torch = pytest.importorskip("torch")

RANKS = 3
PASSES = 5
LAYERS = 2
SLOTS = 6
EXPERTS = 4
PHY2LOG_LP = traces.PHY2LOG_LP[:2]
COUNTS_RTLP = np.random.default_rng(0).integers(0, 9, (RANKS, PASSES, LAYERS, SLOTS))


def record(rank, number, **fields):
    counts = torch.from_numpy(COUNTS_RTLP[rank, number]).to(torch.int32)
    identity = {"forward_pass_id": 100 + number, "rank": rank, "gatherer_key": "primary"}
    return {**identity, "global_physical_count": counts, **fields}


def dump(folder, rank, records, phy2log=PHY2LOG_LP):
    folder.mkdir(exist_ok=True)
    document = {"records": records, "last_physical_to_logical_map": torch.from_numpy(phy2log)}
    torch.save(document, folder / f"expert_distribution_recorder_17{rank}.25_{rank}.pt")


def by_expert(counts_TLP):
    return traces.by_expert(counts_TLP, PHY2LOG_LP, EXPERTS)


def dump_run(folder, ranks=RANKS, first=lambda rank: 0):
    """Write the files of ``ranks`` ranks. Each rank has recorded all passes from ``first(rank)`` onwards."""
    for rank in range(ranks):
        dump(folder, rank, [record(rank, number) for number in range(first(rank), PASSES)])


def test_the_file_of_one_rank_is_rejected_if_the_folder_has_more(tmp_path):
    dump_run(tmp_path / "run")
    path = next((tmp_path / "run").glob("*_1.pt"))
    with pytest.raises(
        HeatError, match=r"has only rank 1's tokens, but .*_0\.pt is in the same folder: open the folder"
    ):
        open_trace(path)
    single = open_trace(path.rename(tmp_path / path.name))
    assert np.array_equal(single.heat(0, PASSES), by_expert(COUNTS_RTLP[1]))


def test_passes_without_tokens_and_dense_layers_are_skipped(tmp_path):
    counts_TLP = COUNTS_RTLP.sum(axis=0) + 1
    with_dense = np.insert(np.insert(counts_TLP, 2, 0, axis=0), 0, 0, axis=1)
    records = [
        {**record(0, 0), "forward_pass_id": number, "global_physical_count": torch.from_numpy(counts_LP)}
        for number, counts_LP in enumerate(with_dense)
    ]
    dump(tmp_path / "run", 0, records, np.insert(PHY2LOG_LP, 0, np.arange(SLOTS) % EXPERTS, axis=0))
    trace = open_trace(tmp_path / "run")
    assert np.array_equal(trace.heat(0, trace.steps), by_expert(counts_TLP))
    assert trace.facts.layer_numbers == (1, 2)


def test_an_empty_ring_buffer_is_rejected(tmp_path):
    buffer = {"rank": 0, "logical_count": torch.zeros(4, 5, EXPERTS, dtype=torch.int32)}
    torch.save(buffer, tmp_path / "idle.pt")
    with pytest.raises(HeatError, match="has no forward pass, because all counts are zero"):
        open_trace(tmp_path / "idle.pt")


def test_passes_that_some_ranks_did_not_record_are_skipped(tmp_path):
    dump_run(tmp_path / "run", first=int)
    trace = open_trace(tmp_path / "run")
    assert np.array_equal(trace.heat(0, trace.steps), by_expert(COUNTS_RTLP.sum(axis=0)[2:]))
    assert "2 passes not recorded by all ranks left out" in trace.facts.origin


def test_per_token_records_are_counted_and_have_phases_and_tokens(tmp_path):
    choices = np.array([[[0, 3, -1], [5, 1, -1]], [[2, 2, -1], [4, 0, -1]]])
    modes = [1, 2, 4]
    for rank in range(RANKS):
        records = [
            {
                "forward_pass_id": number,
                "rank": rank,
                "topk_ids_of_layer": torch.from_numpy(choices),
                "input_ids": [7, 8],
                "forward_mode": mode if rank or mode != 2 else 1,
            }
            for number, mode in enumerate(modes)
        ]
        dump(tmp_path / "run", rank, records)
    trace = open_trace(tmp_path / "run")
    counts_LP = np.array([[1, 1, 0, 1, 0, 1], [1, 0, 2, 0, 1, 0]])
    assert np.array_equal(trace.heat(0, 3), by_expert(np.stack([RANKS * counts_LP] * 3)))
    assert trace.facts.origin.startswith("SGLang recorder, per token, ")
    assert trace.tokens(0, 3).tolist() == [2 * RANKS] * 3
    assert [trace.facts.phases[number] for number in trace.phase_numbers(0, 3)] == [
        "prefill",
        "mixed",
        "unknown",
    ]


def dump_changed(folder, number_of_file, **change):
    dump(folder, number_of_file, [{**record(number_of_file, number), **change} for number in range(PASSES)])


INVALID_RUNS = {
    "another run's map": (
        lambda folder: dump(folder, 2, [record(2, 0)], PHY2LOG_LP[::-1].copy()),
        r"_2.pt: its last_physical_to_logical_map differs from that of the other files; the dumps are not from the",
    ),
    "a rank twice": (
        lambda folder: dump_changed(folder, 2, rank=1),
        "rank 1 recorded forward pass 100 twice",
    ),
    "other shapes": (
        lambda folder: dump_changed(folder, 2, global_physical_count=torch.ones(2, 7, dtype=torch.int32)),
        r"the shapes of the records differ: \[2, 6\], \[2, 7\]",
    ),
    "negative counts": (
        lambda folder: dump_changed(folder, 2, global_physical_count=-torch.ones(2, 6, dtype=torch.int32)),
        "record 0 holds .*global_physical_count",
    ),
    "no counts": (
        lambda folder: dump_changed(folder, 2, global_physical_count=None),
        "record 0 holds no numbers as global_physical_count",
    ),
    "choices past the slots": (
        lambda folder: dump_changed(
            folder, 2, global_physical_count=None, topk_ids_of_layer=torch.full((2, 1, 1), 6)
        ),
        "record 0 holds topk_ids_of_layer from 6 to 6",
    ),
    "a rank that is none": (lambda folder: dump_changed(folder, 2, rank="two"), "has rank 'two'"),
    "no pass in common": (
        lambda folder: dump(folder, 2, [record(2, 0, forward_pass_id=1)]),
        "no forward pass that all 3 ranks recorded",
    ),
    "another kind of file": (
        lambda folder: torch.save({"logical_count": torch.ones(1, 2, 3)}, folder / "stat.pt"),
        "stat.pt: has no records of forward passes; open this file instead of the folder",
    ),
    "damaged": (
        lambda folder: (folder / "cut.pt").write_bytes(b"PK\x03\x04"),
        "cut.pt: is truncated, damaged",
    ),
}


@pytest.mark.parametrize(("damage", "message"), INVALID_RUNS.values(), ids=INVALID_RUNS)
def test_files_that_do_not_form_one_run_are_rejected(tmp_path, damage, message):
    folder = tmp_path / "run"
    dump_run(folder, ranks=2)
    damage(folder)
    with pytest.raises(HeatError, match=message) as refused:
        open_trace(folder)
    assert str(refused.value).startswith(f"{folder}: ")
    assert "\n" not in str(refused.value)


def test_the_users_map_overrides_the_files_map(tmp_path):
    dump(tmp_path / "run", 0, [record(0, 0)], np.zeros((1, 1), dtype=int))
    trace = open_trace(tmp_path / "run", ReadAs(phy2log=PHY2LOG_LP))
    assert np.array_equal(trace.heat(0, 1), by_expert(COUNTS_RTLP[0, :1]))
