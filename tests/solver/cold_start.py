"""Compiles all listed kernels into an empty folder, warms up, and prints how many were compiled only then."""

from __future__ import annotations

from eplb_service.solver.jit import compilations
from eplb_service.solver.warmup import _all_kernels, precompile, warm_up


def main() -> None:
    precompile(_all_kernels())
    late: list[str] = []
    with compilations(late.append):
        warm_up(1)
    print(*late)
    print(len(late))


if __name__ == "__main__":
    main()
