"""Tests of ``eplb trace``: facts, statistics, conversion, slices, synthetic traces, and one-line errors."""

import json

import numpy as np
import pytest

from eplb_core.placement import Placement, par
from eplb_service.io.open_trace import open_trace, read_heat
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb
from tests.cli.published import checked_document
from tests.planner.drawn import rank_loads

HEAT_TLE = synthetic_heat("phased", 100, 3, 16, tokens=256, top_k=2, seed=1)


@pytest.fixture
def path(tmp_path):
    np.savez(tmp_path / "trace.npz", heat=HEAT_TLE)
    return tmp_path / "trace.npz"


def trace(capsys, *arguments):
    return eplb(capsys, "trace", *arguments)


def test_info_prints_the_facts_of_a_trace(path, capsys):
    code, out, err = trace(capsys, "info", path)
    assert (code, err) == (0, "")
    assert "numpy .npz, tokens by logical expert" in out
    reported = checked_document("trace info", trace(capsys, "info", path, "--json")[1])
    names = ("steps", "layers", "experts", "first_step", "last_step")
    assert [reported[name] for name in names] == [100, 3, 16, 0, 99]


def test_stats_agree_with_the_heat(path, capsys):
    code, out, _ = trace(capsys, "stats", path, "--ranks", 4, "--window", 25)
    assert code == 0
    assert "PAR" in out
    printed = trace(capsys, "stats", path, "--ranks", 4, "--window", 25, "--json")[1]
    reported = checked_document("trace stats", printed)
    total_LE = HEAT_TLE.sum(axis=0)
    share_LE = total_LE / total_LE.sum(axis=1, keepdims=True)
    linear = Placement.linear(3, 16, 4, 4)
    assert reported["hottest_L"] == pytest.approx((16 * share_LE.max(axis=1)).tolist())
    assert reported["top_tenth_L"] == pytest.approx(np.sort(share_LE)[:, -2:].sum(axis=1).tolist())
    assert reported["par_L"] == pytest.approx(
        par(rank_loads(HEAT_TLE, linear, linear.default_log2phy())).tolist()
    )
    windows = HEAT_TLE.reshape(4, 25, 3, 16).sum(axis=1)
    shares = windows / windows.sum(axis=2, keepdims=True)
    apart = 0.5 * np.abs(np.diff(shares, axis=0)).sum(axis=2).mean(axis=0)
    assert reported["drift_L"] == pytest.approx(apart.tolist())


def test_the_drift_of_steady_heat_is_sampling_noise(tmp_path, capsys):
    steady = np.random.default_rng(0).multinomial(500, np.full(16, 1 / 16), size=(2000, 2))
    np.save(tmp_path / "a.npy", steady)
    reported = json.loads(trace(capsys, "stats", tmp_path / "a.npy", "--window", 100, "--json")[1])
    assert reported["drift_L"] == pytest.approx(reported["drift_noise_L"], rel=0.1)


def test_a_trace_is_converted_and_sliced(tmp_path, path, capsys):
    native = tmp_path / "a.zarr"
    slice_path = tmp_path / "b.npy"
    printed = f"{native}: 100 steps x 3 layers x 16 experts\n"
    assert trace(capsys, "convert", path, "--out", native)[:2] == (0, printed)
    assert np.array_equal(read_heat(native), HEAT_TLE)
    sliced = trace(
        capsys, "slice", native, "--steps", "20:", "--layers", "1:2", "--out", slice_path, "--json"
    )
    assert checked_document("trace slice", sliced[1])["steps"] == 80
    assert np.array_equal(read_heat(slice_path), HEAT_TLE[20:, 1:2])


def test_sliced_layers_keep_their_layer_numbers(tmp_path, path, capsys):
    a, b, c = (tmp_path / f"{name}.zarr" for name in "abc")
    for source, layers, out, numbers in ((path, "1:3", a, (1, 2)), (a, "1:", b, (2,)), (path, ":2", c, ())):
        assert trace(capsys, "slice", source, "--layers", layers, "--out", out)[0] == 0
        assert open_trace(out).facts.layer_numbers == numbers


@pytest.mark.parametrize("kind", ["static", "drift", "phased", "bursty"])
def test_synth_writes_synthetic_heat_and_records_its_origin(tmp_path, capsys, kind):
    shape = ("--steps", 30, "--layers", 2, "--experts", 16, "--tokens", 64, "--top-k", 2, "--seed", 7)
    assert trace(capsys, "synth", "--kind", kind, *shape, "--out", tmp_path / "a.zarr")[0] == 0
    synthetic = open_trace(tmp_path / "a.zarr")
    assert np.array_equal(synthetic.heat(0, 30), synthetic_heat(kind, 30, 2, 16, tokens=64, top_k=2, seed=7))
    assert synthetic.facts.origin == f"synthetic, {kind}, seed 7"
    assert synthetic.tokens(0, 2).tolist() == [64, 64]


def test_a_trace_of_zeros_is_reported(path, capsys):
    np.savez(path, heat=np.zeros((20, 2, 8), dtype=np.int64))
    code, out, err = trace(capsys, "stats", path, "--ranks", 4)
    assert (code, err) == (0, "")
    assert "All counts are zero" in out
    assert "nan" not in out
