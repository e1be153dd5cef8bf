"""Kernels that are compiled are named and counted on stderr; nothing is shown where all are cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numba
import pytest

from eplb_service.cli.warmup import compile_progress
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


def progress_of(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    @contextmanager
    def compilations(report: Callable[[str], None]) -> Iterator[None]:
        for kernel in kernels:
            report(kernel)
        yield

    monkeypatch.setattr(jit, "compilations", compilations)
    with compile_progress():
        pass
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_a_log_has_a_line_at_the_beginning_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress_of(["tables.spread", "tables.cool"], monkeypatch, capsys) == [
        "compiling the solver, once per machine: kernel 1, tables.spread (0 s)",
        "compiled 2 kernels of the solver, cached for later commands",
    ]


def test_nothing_is_shown_where_all_is_cached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress_of([], monkeypatch, capsys) == []


def test_progress_ends_where_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError), compile_progress():
        raise ZeroDivisionError
    assert capsys.readouterr().err == ""
