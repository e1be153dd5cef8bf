"""Round trips of traces and placements through every format that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_core.heat.window import HeatError
from eplb_core.placement import Placement
from eplb_service.io.copy_trace import SUFFIXES as TRACE_SUFFIXES
from eplb_service.io.copy_trace import copy_trace
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace
from eplb_service.io.placement_file import _FORMATS, FORMATS, read_placement, write_placement
from eplb_service.io.trace import ArrayTrace, TraceFacts
from tests.placement.drawn import placements

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
COUNTS = st.sampled_from((0, 0, 1, 7, 4095, 2**31 - 1)) | st.integers(0, 300)
FRACTIONS = st.sampled_from((0.0, 0.1, 1 / 3, 1e-9, 12345.678))
HEATS = SHAPES.flatmap(
    lambda shape: (
        hnp.arrays(np.int64, shape, elements=COUNTS) | hnp.arrays(np.float64, shape, elements=FRACTIONS)
    )
)


@pytest.mark.parametrize("suffix", TRACE_SUFFIXES)
@settings(max_examples=25)
@example(heat_TLE=np.array([[[1, 0]]]))
@example(heat_TLE=np.arange(300).reshape(150, 2, 1))
@given(heat_TLE=HEATS)
def test_heat_survives_a_round_trip(
    suffix: str, heat_TLE: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="PARQUET IS NOT TESTED: pyarrow is not installed")
    path = tmp_path_factory.mktemp("trace") / f"heat{suffix}"
    if suffix == ".zarr" and (heat_TLE != np.floor(heat_TLE)).any():
        with pytest.raises(HeatError, match="records whole token counts below"):
            copy_trace(ArrayTrace(heat_TLE), path)
        assert list(path.parent.iterdir()) == []
        return
    assert copy_trace(ArrayTrace(heat_TLE), path) == heat_TLE.shape
    # The meaning of a bare array can be ambiguous, so it is passed as an option.
    read = open_trace(path, ReadAs(meaning="heat") if suffix == ".npy" else None)
    # In a file without a list of MoE layers, a layer without tokens counts as dense and is skipped.
    busy = np.flatnonzero(heat_TLE.any(axis=(0, 2)))
    kept = np.arange(heat_TLE.shape[1]) if suffix in (".zarr", ".npz") or not busy.size else busy
    assert (read.facts.layer_numbers or tuple(range(read.layers))) == tuple(kept)
    np.testing.assert_array_equal(read.heat(0, read.steps), heat_TLE[:, kept])


@pytest.mark.parametrize("suffix", TRACE_SUFFIXES)
@pytest.mark.parametrize("numbers", [(3, 4, 5), (0, 2, 9), ()])
def test_layer_numbers_survive_a_round_trip(suffix: str, numbers: tuple[int, ...], tmp_path: Path) -> None:
    heat_TLE = np.arange(1, 25).reshape(2, 3, 4)
    path = tmp_path / f"heat{suffix}"
    copy_trace(ArrayTrace(heat_TLE, TraceFacts(layer_numbers=numbers)), path)
    read = open_trace(path, ReadAs(meaning="heat") if suffix == ".npy" else None)
    assert read.facts.layer_numbers == numbers
    np.testing.assert_array_equal(read.heat(0, 2), heat_TLE)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(placement=placements(), data=st.data())
def test_a_placement_survives_a_round_trip(
    format: Any, placement: Placement, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("placement") / f"placement{_FORMATS[format][0]}"
    layers = placement.layers
    of_model = st.lists(st.integers(0, 20), min_size=layers, max_size=layers, unique=True).map(sorted)
    numbers = data.draw(st.none() | of_model)
    write_placement(path, placement, placement.default_log2phy(), format, numbers)
    read = read_placement(path, placement.experts, placement.ranks, numbers)
    np.testing.assert_array_equal(read.phy2log_LRS, placement.phy2log_LRS)
    assert read.experts == placement.experts
