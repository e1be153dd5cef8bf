"""``eplb solve`` writes a valid placement worth what it says, and refuses bad input before it writes anything."""

import json

import numpy as np
import pytest

from eplb_service import Placement
from eplb_service.cost.curve import write_curves
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.io.placement_file import read_placement
from eplb_service.placement import check_log2phy, par
from eplb_service.planner.score import rank_loads, replicas_woken, split_us
from tests.cli.arguments import eplb, refusal
from tests.cli.published import held
from tests.cost.curves import H200
from tests.solver.layers_of import KNOWN_EXAMPLE

LAYERS, EXPERTS, RANKS, SLOTS = 3, 16, 4, 5


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, counts=synthetic_heat("static", 40, LAYERS, EXPERTS, tokens=256, top_k=2, seed=1))
    return path


def solve(capsys, *arguments):
    return eplb(capsys, "solve", *arguments)


def test_writes_a_valid_placement_that_is_worth_what_is_printed(tmp_path, trace, capsys):
    out = tmp_path / "placement.npz"
    code, printed, _ = solve(
        capsys, "--heat", trace, "--ranks", RANKS, "--slots", SLOTS, "--out", out, "--json"
    )
    assert code == 0
    reported = held("solve", printed)
    with np.load(out) as file:
        placement = Placement(file["phy2log"], EXPERTS)
        log2phy_RLE = file["log2phy"]
    for rank in range(RANKS):
        for layer in range(LAYERS):
            check_log2phy(log2phy_RLE[rank, layer], placement.phy2log_LRS[layer])
    with np.load(trace) as file:
        realised_L = par(rank_loads(file["counts"], placement, log2phy_RLE))
    assert reported["par_after"] == pytest.approx(realised_L.mean())
    assert reported["par_after_per_layer"] == pytest.approx(realised_L.tolist())
    assert reported["par_after"] < reported["par_before"]
    assert reported["moves"] == sum(reported["moves_per_layer"]) > 0
    shape = [reported[name] for name in ("layers", "experts", "ranks", "slots")]
    assert shape == [LAYERS, EXPERTS, RANKS, SLOTS]


def test_table_names_the_result_and_the_file(tmp_path, trace, capsys):
    out = tmp_path / "placement.json"
    code, printed, _ = solve(capsys, "--heat", trace, "--ranks", RANKS, "--slots", SLOTS, "--out", out)
    assert code == 0
    assert f"flashlb: {LAYERS} layers x {EXPERTS} experts on {RANKS} ranks x {SLOTS} slots" in printed
    assert "PAR before" in printed
    assert str(out) in printed
    assert read_placement(out, EXPERTS, RANKS).slots == SLOTS


def test_without_a_file_the_gain_is_shown_and_nothing_written(tmp_path, trace, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, printed, _ = solve(capsys, "--heat", trace, "--ranks", RANKS, "--slots", SLOTS)
    assert code == 0
    assert "PAR before" in printed
    assert printed.endswith("nothing is written without --out.\n")
    assert sorted(tmp_path.iterdir()) == before
    message = "--format and --first-layer say how a file is written; give it with --out"
    shape = ("--heat", trace, "--ranks", RANKS, "--slots", SLOTS)
    assert message in refusal(capsys, "solve", *shape, "--format", "sglang")


def test_the_known_example_is_solved_for_tables_and_for_an_even_split(tmp_path, capsys):
    heat = tmp_path / "heat.npz"
    np.savez(heat, heat=KNOWN_EXAMPLE[None, None, :])
    asked = ("--heat", heat, "--ranks", 8, "--slots", 2, "--out", tmp_path / "placement.npz")
    code, printed, _ = solve(capsys, *asked)
    assert code == 0
    assert "200.00" in printed
    assert "--split even reaches PAR 1.085, hottest rank 196.67." in printed
    _, printed, _ = solve(capsys, *asked, "--split", "even")
    assert "196.67" in printed
    assert "200.00" not in printed
    _, printed, _ = solve(capsys, *asked, "--split", "even", "--json")
    assert json.loads(printed)["par_after_split_even"] is None


def test_a_host_that_deals_gets_dealing_tables(tmp_path, trace, capsys):
    out = tmp_path / "placement.npz"
    shape = ("--ranks", RANKS, "--slots", SLOTS, "--out", out, "--json")
    code, printed, _ = solve(capsys, "--heat", trace, *shape, "--split", "deal", "--deal-width", 4)
    assert code == 0
    with np.load(out) as file:
        placement = Placement(file["phy2log"], EXPERTS)
        tables_RLED = file["log2phy"]
    assert tables_RLED.shape == (RANKS, LAYERS, EXPERTS, 4)
    placement.check_log2phy(tables_RLED)
    reported = json.loads(printed)
    assert reported["par_after"] < reported["par_before"]
    with np.load(trace) as file:
        assert reported["par_after"] == pytest.approx(
            par(rank_loads(file["counts"], placement, tables_RLED)).mean()
        )


def test_from_its_own_result_nothing_moves(tmp_path, trace, capsys):
    first, second = tmp_path / "first.npz", tmp_path / "second.npz"
    shape = ("--heat", trace, "--ranks", RANKS, "--slots", SLOTS, "--json")
    solve(capsys, *shape, "--out", first)
    code, printed, _ = solve(capsys, *shape, "--placement", first, "--out", second)
    reported = json.loads(printed)
    assert code == 0
    assert reported["moves"] == 0
    assert reported["par_after"] <= reported["par_before"]


@pytest.mark.parametrize("policy", ["none", "deepseek"])
def test_other_policies(tmp_path, trace, capsys, policy):
    out = tmp_path / "placement.npz"
    shape = ("--ranks", RANKS, "--slots", SLOTS, "--out", out, "--json", "--policy", policy)
    code, printed, _ = solve(capsys, "--heat", trace, *shape)
    reported = json.loads(printed)
    assert code == 0
    assert reported["policy"] == policy
    assert (reported["moves"] == 0) == (policy == "none")


def test_same_seed_same_file(tmp_path, trace, capsys):
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for threads, out in enumerate(files, start=1):
        arguments = ("--ranks", RANKS, "--slots", SLOTS, "--seed", 3, "--threads", threads, "--out", out)
        assert solve(capsys, "--heat", trace, *arguments)[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_sources_in_a_trace_are_used(tmp_path, capsys):
    source_TRLE = np.random.default_rng(0).poisson(20, (40, RANKS, LAYERS, EXPERTS))
    source_TRLE[:, 0] *= 5
    path, out = tmp_path / "trace.npz", tmp_path / "out.npz"
    np.savez(path, counts=source_TRLE.sum(axis=1), source=source_TRLE)
    code, printed, _ = solve(
        capsys, "--heat", path, "--ranks", RANKS, "--slots", SLOTS, "--out", out, "--json", "--seed", 1
    )
    assert code == 0
    with np.load(out) as file:
        placement, log2phy_RLE = Placement(file["phy2log"], EXPERTS), file["log2phy"]
    source_RLE = source_TRLE.sum(axis=0).astype(float)
    realised_L = par(rank_loads(source_TRLE.sum(axis=1), placement, log2phy_RLE, source_RLE))
    assert json.loads(printed)["par_after"] == pytest.approx(realised_L.mean())


def test_a_prior_is_what_the_start_was_placed_for(tmp_path, trace, capsys):
    prior, out = tmp_path / "prefill.npz", tmp_path / "placement.npz"
    np.savez(prior, counts=synthetic_heat("static", 64, LAYERS, EXPERTS, tokens=512, top_k=2, seed=1))
    common = ("--heat", trace, "--ranks", RANKS, "--slots", SLOTS, "--out", out, "--json")
    reported = {
        name: json.loads(solve(capsys, *common, *more)[1])
        for name, more in {"cold": (), "prior": ("--prior", prior)}.items()
    }
    assert reported["prior"]["par_before"] < reported["cold"]["par_before"]
    assert reported["prior"]["moves"] < reported["cold"]["moves"]


def test_under_a_curve_a_stepwise_split_is_set_against_tables_net_of_what_it_takes(tmp_path, trace, capsys):
    write_curves(tmp_path / "curve.json", [H200])
    arguments = ["--heat", trace, "--ranks", RANKS, "--slots", SLOTS, "--split", "step"]
    arguments += ["--cost-curve", tmp_path / "curve.json", "--out", tmp_path / "a.npz"]
    code, printed, _ = solve(capsys, *arguments)
    assert code == 0
    shown = " ".join(printed.split())
    code, printed, _ = solve(capsys, *arguments, "--json")
    assert code == 0
    reported = held("solve", printed)
    assert reported["split"]["bytes"] == (RANKS - 1) * EXPERTS * 4
    assert f"The split itself takes {reported['split_ms']:.3f} ms of a step more" in shown
    assert reported["split_ms"] == pytest.approx(LAYERS * reported["split"]["us"] / 1e3)
    with np.load(trace) as file, np.load(tmp_path / "a.npz") as made:
        placement = Placement(made["phy2log"], EXPERTS)
        us_TL = split_us(file["counts"], placement, made["log2phy"], None, "step", H200)
        assert reported["replicas_woken_per_rank"] == pytest.approx(replicas_woken(file["counts"], placement))
    assert reported["moe_ms_after"] == pytest.approx(us_TL.mean(axis=0).sum() / 1e3)
    assert reported["moe_ms_by_tables"] > 0
