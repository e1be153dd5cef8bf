"""How much is measured: everything, or what two minutes allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.solver import cpu_time, scaling
from benchmarks.solver.heat_kinds import SHAPES, Shape
from benchmarks.solver.source_tables import SPREADS


@dataclass(frozen=True)
class Extent:
    """How many shapes, seeds, windows, repeats and seconds go into each measurement."""

    shapes: tuple[Shape, ...] = SHAPES
    seeds: tuple[int, ...] = (1, 2, 3)
    timed: tuple[Shape, ...] = (*cpu_time.COMPARED, cpu_time.LARGE)
    repeats: int = 5
    processes: int = 3
    spreads: tuple[float, ...] = SPREADS
    table_shape: Shape = (8, 256, 32, 9)
    loop_shape: Shape = (16, 256, 32, 9)
    loop_windows: int = 9
    ablation_windows: int = 6
    curves: Mapping[str, Mapping[int, Shape]] | None = None
    long_seconds: float = 10.0

    @property
    def growing(self) -> Mapping[str, Mapping[int, Shape]]:
        """The scaling curves to draw; all of them unless ``curves`` names some."""
        return scaling.CURVES if self.curves is None else self.curves


FULL = Extent()
QUICK = Extent(
    shapes=((16, 256, 32, 9),),
    seeds=(1,),
    timed=(SHAPES[1],),
    repeats=2,
    processes=1,
    spreads=(0.3,),
    table_shape=(2, 256, 32, 9),
    loop_shape=(4, 256, 32, 9),
    loop_windows=4,
    ablation_windows=3,
    curves={"layers": {size: scaling.CURVES["layers"][size] for size in (4, 8, 16)}},
    long_seconds=0.5,
)
