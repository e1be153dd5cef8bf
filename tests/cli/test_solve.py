"""Tests of ``eplb solve``: a valid placement with the promised PAR, and errors before anything is written."""

import json
import re

import numpy as np
import pytest

from eplb_core.cost.curve import write_curves
from eplb_core.placement import par
from eplb_core.planner.score import slowest_rank_us, split_loads
from eplb_service import Placement
from eplb_service.io.placement_file import read_placement
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb, refusal
from tests.cli.published import checked_document
from tests.cost.curves import H200
from tests.solver.layers_of import KNOWN_EXAMPLE

LAYERS = 3
EXPERTS = 16
RANKS = 4
SLOTS = 5
SHAPE = ("--ranks", RANKS, "--slots", SLOTS)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, counts=synthetic_heat("static", 40, LAYERS, EXPERTS, tokens=256, top_k=2, seed=1))
    return path


def drawn_par(counts_TLE, placement, tables, source_RLE, options):
    """Return the PAR of whole tokens routed by the tables, averaged over 50 draws of the steps, float64 ``[L]``."""
    split = "deal" if "deal" in options else "tables"
    draws = [
        par(split_loads(counts_TLE, placement, tables, source_RLE, split, draw * len(counts_TLE)))
        for draw in range(50)
    ]
    return np.mean(draws, axis=0)


def solve(capsys, *arguments):
    return eplb(capsys, "solve", *arguments)


@pytest.mark.parametrize(
    ("options", "has_sources", "width"),
    [((), False, None), ((), True, None), (("--split", "deal", "--deal-width", 4), False, 4)],
    ids=["tables", "sources", "deal"],
)
def test_the_written_placement_is_valid_and_has_the_printed_par(
    tmp_path, capsys, trace, options, has_sources, width
):
    out = tmp_path / "placement.npz"
    source_RLE = None
    counts_TLE = np.load(trace)["counts"]
    if has_sources:
        source_TRLE = np.random.default_rng(0).poisson(20, (40, RANKS, LAYERS, EXPERTS))
        source_TRLE[:, 0] *= 5
        counts_TLE = source_TRLE.sum(axis=1)
        source_RLE = source_TRLE.sum(axis=0).astype(float)
        np.savez(trace, counts=counts_TLE, source=source_TRLE)
    code, printed, _ = solve(capsys, "--heat", trace, *SHAPE, *options, "--out", out, "--json")
    assert code == 0
    reported = checked_document("solve", printed)
    with np.load(out) as file:
        placement = Placement(file["phy2log"], EXPERTS)
        tables = file["log2phy"]
    assert tables.shape == (RANKS, LAYERS, EXPERTS, *([] if width is None else [width]))
    placement.check_log2phy(tables)
    assert reported["par_after"] == pytest.approx(np.mean(reported["par_after_L"]))
    # The mean of 50 draws has a standard error of 0.1 %. The promise also allows for overfitting to the window, which
    # adds at most 0.02 here.
    for promised, drawn in zip(
        reported["par_after_L"], drawn_par(counts_TLE, placement, tables, source_RLE, options), strict=True
    ):
        assert 0.997 * drawn <= promised <= 1.003 * drawn + 0.02
    assert reported["par_after"] < reported["par_before"]
    assert reported["moves"] == sum(reported["moves_L"]) > 0
    shape = [reported[name] for name in ("layers", "experts", "ranks", "slots")]
    assert shape == [LAYERS, EXPERTS, RANKS, SLOTS]


def test_the_gain_is_printed_with_the_file_name_or_a_note_that_none_was_written(
    tmp_path, trace, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "placement.json"
    shape = ("--heat", trace, *SHAPE)
    code, printed, _ = solve(capsys, *shape)
    assert code == 0
    assert f"flashlb: {LAYERS} layers x {EXPERTS} experts on {RANKS} ranks x {SLOTS} slots" in printed
    assert "PAR before" in printed
    assert printed.endswith("nothing was written (no --out).\n")
    assert sorted(tmp_path.iterdir()) == before
    message = "--format, --first-layer and --draft-layers apply to a written file; add --out"
    assert message in refusal(capsys, "solve", *shape, "--format", "sglang")
    assert f"written to {out}" in solve(capsys, *shape, "--out", out)[1]
    assert read_placement(out, EXPERTS, RANKS).slots == SLOTS


def test_the_known_example_is_solved_for_tables_and_for_an_even_split(tmp_path, capsys):
    heat = tmp_path / "heat.npz"
    np.savez(heat, heat=KNOWN_EXAMPLE[None, None, :])
    arguments = ("--heat", heat, "--ranks", 8, "--slots", 2, "--out", tmp_path / "placement.npz")
    code, printed, _ = solve(capsys, *arguments)
    assert code == 0
    # The expected splits put 200 and 196.67 tokens on the hottest rank. Whole tokens scatter around them: 400 draws
    # have means of 213.8 and 208.1, with a standard error of 0.2 %.
    hottest = float(re.search(r"all 1 .* (\d+\.\d+) +10\.0", printed)[1])
    assert hottest == pytest.approx(213.8, rel=0.006)
    even = re.search(
        r"\(vLLM, --split even\) reaches PAR (\S+); its hottest rank processes (\S+) tokens per step\.\n",
        printed,
    )
    assert float(even[2]) == pytest.approx(208.1, rel=0.006)
    assert float(even[1]) == pytest.approx(float(even[2]) / 181.25, abs=1e-3)
    _, printed, _ = solve(capsys, *arguments, "--split", "even", "--json")
    assert json.loads(printed)["par_after_split_even"] is None


def test_with_a_cost_curve_a_stepwise_split_is_compared_with_tables_net_of_its_cost(tmp_path, trace, capsys):
    write_curves(tmp_path / "curve.json", [H200])
    arguments = ["--heat", trace, *SHAPE, "--split", "step"]
    arguments += ["--cost-curve", tmp_path / "curve.json", "--out", tmp_path / "a.npz"]
    code, printed, _ = solve(capsys, *arguments)
    assert code == 0
    shown = " ".join(printed.split())
    code, printed, _ = solve(capsys, *arguments, "--json")
    assert code == 0
    reported = checked_document("solve", printed)
    assert f"The stepwise split itself takes {reported['split_ms']:.3f} ms of a step," in shown
    assert reported["split_ms"] == pytest.approx(LAYERS * reported["split"]["us"] / 1e3)
    with np.load(trace) as file, np.load(tmp_path / "a.npz") as solution:
        placement = Placement(solution["phy2log"], EXPERTS)
        us_TL = slowest_rank_us(file["counts"], placement, solution["log2phy"], None, "step", H200)
    assert reported["ms_after"] == pytest.approx(us_TL.mean(axis=0).sum() / 1e3)
    assert reported["ms_by_tables"] > 0
