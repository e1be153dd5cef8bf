"""A trace of any format is recognised by its content and read as it was written, or refused in a line that names it."""

import json

import numpy as np
import pytest

from eplb_service.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace, read_heat

HEAT_TLE = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
PHY2LOG_LP = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2], [0, 0, 1, 2, 3, 3]])


def slots_of(heat_TLE, phy2log_LP):
    """Tokens by slot whose sums by expert are ``heat_TLE``: a replica gets the rest, those before it one token."""
    slots_TLP = np.zeros((len(heat_TLE), *phy2log_LP.shape), dtype=np.int32)
    for layer, phy2log_P in enumerate(phy2log_LP):
        for expert in range(heat_TLE.shape[2]):
            *others, last = np.flatnonzero(phy2log_P == expert)
            for slot in others:
                slots_TLP[:, layer, slot] = heat_TLE[:, layer, expert] // 3
            rest_T = heat_TLE[:, layer, expert] - slots_TLP[:, layer, others].sum(axis=1)
            slots_TLP[:, layer, last] = rest_T
    return slots_TLP


@pytest.mark.parametrize("name", ["heat", "counts", "logical_count"])
def test_npz_under_each_name(tmp_path, name):
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, other=np.zeros(1), **{name: HEAT_TLE})
    heat = read_heat(path)
    assert heat.dtype == np.int64
    assert np.array_equal(heat, HEAT_TLE)


def test_npy_is_mapped_and_keeps_fractions(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, HEAT_TLE / 2)
    trace = open_trace(path)
    assert isinstance(trace.heat_TLE, np.memmap)
    assert trace.shape == (2, 3, 4)
    assert np.array_equal(trace.heat(1, 2), HEAT_TLE[1:] / 2)


def test_the_name_does_not_matter(tmp_path):
    path = tmp_path / "trace.recorded"
    with path.open("wb") as file:
        np.savez(file, heat=HEAT_TLE)
    assert np.array_equal(read_heat(path), HEAT_TLE)


def test_vllm_window_with_its_map(tmp_path):
    path, map_path = tmp_path / "window.npz", tmp_path / "map.npy"
    slots_TLP = slots_of(HEAT_TLE, PHY2LOG_LP)
    np.savez(path, expert_load_window=slots_TLP, physical_to_logical_map=PHY2LOG_LP)
    assert np.array_equal(read_heat(path), HEAT_TLE)
    np.savez(path, expert_load_window=slots_TLP)
    with pytest.raises(HeatError, match="without their placement: give the expert in each slot with --map"):
        read_heat(path)
    np.save(map_path, PHY2LOG_LP)
    assert np.array_equal(read_heat(path, ReadAs(phy2log=np.load(map_path))), HEAT_TLE)
    np.save(path.with_suffix(".npy"), slots_TLP)
    assert np.array_equal(read_heat(path.with_suffix(".npy"), ReadAs(phy2log=PHY2LOG_LP)), HEAT_TLE)


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_vllms_view_is_never_taken_for_logical_experts(tmp_path, suffix):
    path, slots_TLP = tmp_path / f"expert_load_view_rank0{suffix}", slots_of(HEAT_TLE, PHY2LOG_LP)
    if suffix == ".npy":
        np.save(path, slots_TLP)
    else:
        path.write_text(json.dumps(slots_TLP.tolist()))
    with pytest.raises(HeatError, match=r"without their placement: give .* with --map, or say --as heat"):
        read_heat(path)
    assert np.array_equal(read_heat(path, ReadAs(phy2log=PHY2LOG_LP)), HEAT_TLE)
    assert np.array_equal(read_heat(path, ReadAs(meaning="heat")), slots_TLP)


def test_what_vllm_ascend_gathers_from_its_ranks_needs_the_map(tmp_path):
    path, slots_TLP = tmp_path / "load.npy", slots_of(HEAT_TLE, PHY2LOG_LP)
    np.save(path, slots_TLP.reshape(*slots_TLP.shape[:2], 2, -1))
    with pytest.raises(HeatError, match="without their placement"):
        read_heat(path)
    for phy2log in (PHY2LOG_LP, PHY2LOG_LP.reshape(len(PHY2LOG_LP), 2, -1)):
        trace = open_trace(path, ReadAs(phy2log=phy2log))
        assert np.array_equal(trace.heat(0, trace.steps), HEAT_TLE)
        assert (trace.facts.ranks, trace.facts.slots) == (2, PHY2LOG_LP.shape[1] // 2)


def test_deepseek_weights_are_one_step(tmp_path):
    path = tmp_path / "weights.npy"
    np.save(path, HEAT_TLE[0])
    assert np.array_equal(read_heat(path), HEAT_TLE[:1])


@pytest.mark.parametrize(
    "document",
    [
        HEAT_TLE.tolist(),
        {"heat": HEAT_TLE.tolist(), "model": "x"},
        {"rank": 0, "logical_count": HEAT_TLE.tolist()},
        {
            "records": [
                {
                    "forward_pass_id": 8,
                    "rank": 0,
                    "global_physical_count": slots_of(HEAT_TLE, PHY2LOG_LP)[1].tolist(),
                },
                {
                    "forward_pass_id": 7,
                    "rank": 0,
                    "global_physical_count": slots_of(HEAT_TLE, PHY2LOG_LP)[0].tolist(),
                },
                *(
                    {
                        "forward_pass_id": number,
                        "rank": 1,
                        "global_physical_count": np.zeros((3, 6), dtype=int).tolist(),
                    }
                    for number in (7, 8)
                ),
            ],
            "last_physical_to_logical_map": PHY2LOG_LP.tolist(),
        },
    ],
    ids=["array", "named", "SGLang", "SGLang per pass"],
)
def test_json(tmp_path, document):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    assert np.array_equal(read_heat(path), HEAT_TLE)


def test_csv_of_counts_in_any_order_and_of_weights(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{count},{t + 5},{layer},{e}" for (t, layer, e), count in np.ndenumerate(HEAT_TLE) if count]
    path.write_text("tokens,step,layer,expert\n" + "\n".join(rows[::-1]) + "\n")
    assert np.array_equal(read_heat(path), HEAT_TLE)
    path.write_text("\n".join(",".join(map(str, row)) for row in HEAT_TLE[0]))
    assert np.array_equal(read_heat(path), HEAT_TLE[:1])


def test_routes_are_batched_by_the_stated_rule(tmp_path):
    path = tmp_path / "routes.npz"
    routes_KLC = np.array([[[0, 1]], [[1, 2]], [[2, 3]], [[3, 0]], [[0, 2]], [[1, 3]]], dtype=np.uint8)
    np.savez(path, routes=routes_KLC, req_ptr=np.array([0, 3, 4, 6]), num_experts=np.int64(5))
    trace = open_trace(path, ReadAs(batch=2))
    # Requests 0 (tokens 0, 1, 2) and 1 (token 3) begin; request 2 (tokens 4, 5) takes the place of request 1.
    steps = [(0, 3), (1, 4), (2, 5)]
    wanted_TE = np.zeros((3, 5), dtype=int)
    for step, tokens in enumerate(steps):
        for token in tokens:
            wanted_TE[step, routes_KLC[token, 0]] += 1
    assert np.array_equal(trace.heat(0, 3)[:, 0], wanted_TE)
    assert trace.tokens(0, 3).tolist() == [2, 2, 2]
    assert trace.facts.top_k == 2
    assert "3 requests: 2 decoded side by side" in trace.facts.batching
    assert open_trace(path, ReadAs(batch=3)).steps == 1


def test_bare_routes_are_not_taken_for_heat(tmp_path):
    path = tmp_path / "routes.npy"
    routes_KLC = np.argsort(np.random.default_rng(0).random((200, 3, 16)), axis=2)[:, :, :4]
    np.save(path, routes_KLC)
    with pytest.raises(HeatError, match="say --as routes"):
        open_trace(path)
    trace = open_trace(path, ReadAs(meaning="routes", experts=16, batch=50))
    assert trace.shape == (4, 3, 16)
    assert (trace.heat(0, 4).sum(axis=2) == 50 * 4).all()
    assert open_trace(path, ReadAs(meaning="heat")).shape == (200, 3, 4)


def refusal(path, read_as=None):
    with pytest.raises(HeatError) as caught:
        read_heat(path, read_as)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".json"])
def test_a_file_cut_at_any_point_is_refused(tmp_path, suffix):
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    if suffix == ".npz":
        np.savez_compressed(whole, heat=HEAT_TLE)
    elif suffix == ".npy":
        np.save(whole, HEAT_TLE)
    else:
        whole.write_text(json.dumps({"heat": HEAT_TLE.tolist()}))
    data = whole.read_bytes()
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        refusal(cut)


def test_damage_inside_an_npz_is_refused(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, heat=np.random.default_rng(0).integers(0, 1000, (20, 3, 8)))
    data = bytearray(path.read_bytes())
    for place in range(60, len(data) - 200, 37):
        damaged = data.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        refusal(path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 3, 4), -1), "heat is -1 at step 0, layer 0, expert 0"),
        (np.full((2, 3, 4), np.nan), "heat is nan at step 0"),
        (np.full((2, 3, 4), np.inf), "heat is inf at step 0"),
        (np.zeros(3), "[steps, layers, experts]"),
        (np.zeros((2, 3, 4, 1)), "[2, 3, 4, 1]"),
        (np.zeros((0, 3, 4)), "holds no steps"),
        (np.zeros((2, 0, 4)), "[2, 0, 4]"),
        (np.full((2, 3, 4), "1"), "holds numbers"),
        (np.full((2, 3, 4), 1j), "holds numbers"),
        (np.full((2, 3, 4), None), "no plain numbers"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_arrays_that_cannot_be_heat_are_refused(tmp_path, suffix, array, message):
    path = tmp_path / f"trace{suffix}"
    if suffix == ".npz":
        np.savez(path, heat=array)
    else:
        np.save(path, array)
    reported = refusal(path)
    assert message in reported or str(list(array.shape)) in reported


def test_a_bad_step_late_in_a_trace_is_named_where_it_is_read(tmp_path):
    path = tmp_path / "trace.npy"
    heat = np.ones((100, 1, 2))
    heat[90, 0, 1] = -3
    np.save(path, heat)
    trace = open_trace(path)
    trace.heat(0, 90)
    with pytest.raises(HeatError, match=r"step 10, layer 0, expert 1.*steps count from 80 on"):
        trace.heat(80, 100)


HOSTILE = {
    "an npz of other arrays": (lambda p: np.savez(p, xs=HEAT_TLE), "found xs [2, 3, 4]"),
    "an empty file": (lambda p: p.write_bytes(b""), "is empty"),
    "a pickle": (lambda p: p.write_bytes(b"\x80\x04K\x01."), "could run code"),
    "an old torch file": (
        lambda p: p.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."),
        "before torch 1.6",
    ),
    "an executable": (lambda p: p.write_bytes(b"\x7fELF\x02\x01\x01\x00" + bytes(64)), "none of the formats"),
    "words": (lambda p: p.write_text("hello\nworld\n"), "is no CSV"),
    "other bytes": (lambda p: p.write_bytes(b"\xff\xfe\xfd\xfc" * 20), "neither text"),
    "a zip of something": (np.savez, "data.pkl"),
    "ragged JSON": (lambda p: p.write_text("[[[1, 2]], [[1]]]"), "differ in length"),
    "deep JSON": (lambda p: p.write_text("[" * 100_000), "is not JSON"),
    "JSON of words": (lambda p: p.write_text('{"heat": "hot"}'), "found heat"),
    "records of nothing": (lambda p: p.write_text('{"records": []}'), "no records"),
    "records without counts": (lambda p: p.write_text('{"records": [{"rank": 0}]}'), "global_physical_count"),
    "a CSV with words": (lambda p: p.write_text("step,layer,expert,tokens\n0,0,zero,1\n"), "is no CSV"),
    "a CSV with a negative layer": (lambda p: p.write_text("step,layer,expert,tokens\n0,-1,0,1\n"), "line 2"),
    "a CSV with a huge step": (
        lambda p: p.write_text("step,layer,expert,tokens\n0,0,0,1\n2147483647,2000000,9,1\n"),
        "more than this machine's memory",
    ),
}


@pytest.mark.parametrize(("write", "message"), HOSTILE.values(), ids=HOSTILE)
def test_other_files_are_refused(tmp_path, write, message):
    path = tmp_path / "trace.npz"
    write(path)
    assert message in refusal(path)


def test_missing_files_and_folders_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.npz")
    assert "folder without zarr.json" in refusal(tmp_path)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_header_that_claims_the_impossible_is_refused(tmp_path, suffix):
    path, header = tmp_path / f"trace{suffix}", {"descr": "<f8", "fortran_order": False}
    with (tmp_path / "trace.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (1 << 20, 1 << 10, 1 << 10)})
        file.write(bytes(64))
    if suffix == ".npz":
        import zipfile

        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "trace.npy", "heat.npy")
        assert "more than this machine's memory" in refusal(path)
    refusal(path)


@pytest.mark.parametrize(
    ("read_as", "message"),
    [
        (ReadAs(phy2log=PHY2LOG_LP[:, :5]), "does not fit heat of 3 layers x 6 slots"),
        (ReadAs(phy2log=PHY2LOG_LP - 1), "names expert -1 in layer 0, slot 0"),
        (ReadAs(phy2log=PHY2LOG_LP / 1.0), "holds expert numbers"),
        (ReadAs(phy2log=PHY2LOG_LP, experts=3), "names expert 3; there are 3"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(tmp_path, read_as, message):
    path = tmp_path / "window.npz"
    np.savez(path, expert_load_window=slots_of(HEAT_TLE, PHY2LOG_LP))
    assert message in refusal(path, read_as)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"routes": np.full((4, 1, 2), 9), "num_experts": 8},
            "name expert 9 at token 0, layer 0; there are 8",
        ),
        ({"routes": np.zeros((4, 1, 2), dtype=int), "req_ptr": [0, 3]}, "run from 0 to 4"),
        ({"routes": np.zeros((4, 1, 2), dtype=int), "req_ptr": [0, 3, 2, 4]}, "never fall"),
        ({"routes": np.zeros((4, 1, 2), dtype=int), "req_ptr": [0.0, 4.0]}, "integers [requests + 1]"),
        ({"routes": np.zeros((4, 1, 2), dtype=int)}, "fill no step of 64"),
        ({"routes": np.zeros((4, 1, 2))}, "hold expert numbers"),
        ({"routes": np.zeros((4, 2), dtype=int)}, "[tokens, layers, choices]"),
        ({"routes": np.zeros((4, 1, 2), dtype=int), "num_experts": -1}, "one positive integer"),
    ],
)
def test_routes_that_contradict_themselves_are_refused(tmp_path, arrays, message):
    path = tmp_path / "routes.npz"
    np.savez(path, **arrays)
    assert message in refusal(path)


def test_sources_and_phases_come_with_the_heat(tmp_path):
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
    assert "source heat is [19, 4, 3, 8], expected counts [20, 4, 3, 8]" in refusal(path)
    np.savez(path, **arrays, phase_names=np.array(["chat"]))
    assert "phases are numbers below 1" in refusal(path)


def test_counts_of_more_than_the_experts_that_there_are_may_be_slots(tmp_path):
    path = tmp_path / "load.npy"
    np.save(path, slots_of(HEAT_TLE, PHY2LOG_LP))
    with pytest.raises(
        HeatError, match=r"counts 6 experts, and there are 4: if these are physical slots, .* --map"
    ):
        read_heat(path, ReadAs(experts=4))
    assert np.array_equal(read_heat(path, ReadAs(experts=4, phy2log=PHY2LOG_LP)), HEAT_TLE)
