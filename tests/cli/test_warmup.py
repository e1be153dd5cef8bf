"""The solver is compiled kernel by kernel, each named once, before work is timed."""

from __future__ import annotations

import numba
import pytest

from eplb_service.cli.main import run
from eplb_service.solver import jit


def test_each_kernel_of_the_solver_is_reported_once_as_it_is_compiled() -> None:
    def doubled(x: int) -> int:
        return 2 * x

    doubled.__module__ = "eplb_service.solver.made_up"
    compiled = numba.njit(doubled)
    reported: list[str] = []
    with jit.compilations(reported.append):
        compiled(1)
        compiled(2)
        numba.njit(lambda x: x + 1)(1)
    compiled(1.5)
    assert reported == ["made_up.doubled"]


def test_it_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warmup"]) == 0
    assert capsys.readouterr().out.startswith("solver compiled and cached in ")
