"""A window accepts heat of any numeric type and gives kernels only the types that they are compiled for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_core.heat.window import Window, checked_heat, widened
from eplb_core.solver.window import sum_episodes

COUNTS_TLE = np.arange(24).reshape(4, 2, 3)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float64])
def test_heat_that_kernels_can_read_is_not_copied(kind: type) -> None:
    heat_TLE = COUNTS_TLE.astype(kind)
    assert np.shares_memory(checked_heat(heat_TLE), heat_TLE)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("i2", "i8"), ("u8", "i8"), (">i4", "i8"), (">i8", "i8"), ("f2", "f8"), ("f4", "f8"), (">f8", "f8")],
)
def test_types_that_kernels_cannot_read_are_widened(kind: str, expected: str) -> None:
    heat_TLE = checked_heat(COUNTS_TLE.astype(kind))
    assert heat_TLE.dtype == np.dtype(expected)
    np.testing.assert_array_equal(heat_TLE, COUNTS_TLE)


def test_mapped_strided_and_misaligned_heat_is_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "heat.npy", COUNTS_TLE.astype(np.int32))
    misaligned = np.frombuffer(bytearray(1 + 4 * COUNTS_TLE.size), dtype=np.int32, offset=1).reshape(
        COUNTS_TLE.shape
    )
    misaligned[:] = COUNTS_TLE
    strided = np.repeat(COUNTS_TLE.astype(np.int32), 2, axis=2)[:, :, ::2]
    for heat_TLE in (np.load(tmp_path / "heat.npy", mmap_mode="r"), misaligned, strided):
        copied = checked_heat(heat_TLE)
        assert copied.dtype == np.int32
        assert copied.flags.c_contiguous
        assert copied.flags.aligned
        assert copied.flags.writeable
        np.testing.assert_array_equal(copied, COUNTS_TLE)


def test_external_policies_get_integer_counts_as_int64() -> None:
    assert widened(COUNTS_TLE.astype(np.int32)).dtype == np.int64


def test_summing_int32_heat_into_episodes_does_not_overflow() -> None:
    heat_TLE = np.full((4, 1, 2), 2**30, dtype=np.int32)
    sums_KNE = sum_episodes(Window(heat_TLE).heat_TLE, np.array([0]), 1)
    np.testing.assert_array_equal(sums_KNE, np.full((1, 1, 2), 2.0**32))
