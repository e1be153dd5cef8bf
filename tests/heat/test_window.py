"""A window takes heat of any numeric type, and hands kernels only what they were compiled for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_core.heat.window import Window, checked_heat, widened
from eplb_core.solver.window import sum_episodes

COUNTS_TLE = np.arange(24).reshape(4, 2, 3)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float64])
def test_heat_that_kernels_read_is_not_copied(kind: type) -> None:
    heat_TLE = COUNTS_TLE.astype(kind)
    assert np.shares_memory(checked_heat(heat_TLE), heat_TLE)


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [("i2", "i8"), ("u8", "i8"), (">i4", "i8"), (">i8", "i8"), ("f2", "f8"), ("f4", "f8"), (">f8", "f8")],
)
def test_other_types_are_widened(kind: str, becomes: str) -> None:
    found = checked_heat(COUNTS_TLE.astype(kind))
    assert found.dtype == np.dtype(becomes)
    np.testing.assert_array_equal(found, COUNTS_TLE)


def test_what_is_mapped_strided_or_misaligned_is_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "heat.npy", COUNTS_TLE.astype(np.int32))
    odd = np.frombuffer(bytearray(1 + 4 * COUNTS_TLE.size), dtype=np.int32, offset=1).reshape(
        COUNTS_TLE.shape
    )
    odd[:] = COUNTS_TLE
    strided = np.repeat(COUNTS_TLE.astype(np.int32), 2, axis=2)[:, :, ::2]
    for heat_TLE in (np.load(tmp_path / "heat.npy", mmap_mode="r"), odd, strided):
        found = checked_heat(heat_TLE)
        assert found.dtype == np.int32
        assert found.flags.c_contiguous
        assert found.flags.aligned
        assert found.flags.writeable
        np.testing.assert_array_equal(found, COUNTS_TLE)


def test_external_policies_get_whole_counts_as_int64() -> None:
    assert widened(COUNTS_TLE.astype(np.int32)).dtype == np.int64


def test_episodes_of_int32_do_not_overflow() -> None:
    heat_TLE = np.full((4, 1, 2), 2**30, dtype=np.int32)
    found_KNE = sum_episodes(Window(heat_TLE).heat_TLE, np.array([0]), 1)
    np.testing.assert_array_equal(found_KNE, np.full((1, 1, 2), 2.0**32))
